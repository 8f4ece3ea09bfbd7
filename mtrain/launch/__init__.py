"""Starting the ranks of a run on this machine, and watching them."""
