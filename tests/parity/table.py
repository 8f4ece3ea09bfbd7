"""Measures every layout against the oracle and prints a Markdown table: `python -m tests.parity.table`."""

from tests.parity.batches import three_steps
from tests.parity.cases import LAYOUTS
from tests.parity.compare import deviation, run_case, run_oracle
from tests.pool import Pool


def main() -> None:
    """Prints one row a layout."""
    pool = Pool()
    batches = three_steps()
    print("| layout | loss | grad-norm | gradients | weights after 3 steps |")
    print("|---|---|---|---|---|")
    for case in LAYOUTS:
        config = case.config()
        found = deviation(run_case(pool, case, batches), run_oracle(config, batches), config)
        print(f"| {case} | " + " | ".join(f"{value:.1e}" for value in found) + " |", flush=True)


if __name__ == "__main__":
    main()
