"""Check `mtrain verify machine`: the collectives, layouts and links of one node."""
