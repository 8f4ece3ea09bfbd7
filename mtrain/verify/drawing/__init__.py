"""Pages that need nothing but themselves: HTML and SVG as text."""
