"""What a sample is: windows of running text, conversations."""
