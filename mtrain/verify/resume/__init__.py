"""Check `mtrain verify resume`: compares resumed runs with one that never stopped."""
