"""Makes tokenizers and tokenised corpora, before any run."""
