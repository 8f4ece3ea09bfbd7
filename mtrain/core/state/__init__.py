"""What a rank holds, as values that are saved, loaded and checked."""
