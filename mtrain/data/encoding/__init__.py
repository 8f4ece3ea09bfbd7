"""One record of a finetuning source -> token ids and their weights (`encoder.RecordEncoder`)."""
