"""Token ids of finetuning records, made once and mapped into memory by every rank and every later run."""
