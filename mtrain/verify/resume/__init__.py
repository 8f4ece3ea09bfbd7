"""`mtrain verify resume`: a resumed run against one that never stopped."""
