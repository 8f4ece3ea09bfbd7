"""One record of a finetuning source -> token ids and what each of them counts (`encoder.encoder_of`)."""
