"""Pages of `mtrain`: single files of HTML, from templates, with charts."""
