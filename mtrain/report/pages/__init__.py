"""Pages of `mtrain`: single HTML files from templates, with charts."""
