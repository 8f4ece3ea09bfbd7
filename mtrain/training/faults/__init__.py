"""Bad steps: found before they are applied, and what follows."""
