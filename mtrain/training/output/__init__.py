"""From what the last stage returns to the sums and the gradient of the objective."""
