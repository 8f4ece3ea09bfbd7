"""Reports two starts of a run to a tracker, and prints what the tracker's files hold, as JSON.

Usage: two_starts.py TRACKER FOLDER; for a Python that has the tracker.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from tests.report.metrics.trackers.test_libraries import everything_below, start


def losses_of(tracker: str, folder: Path) -> list[float]:
    """Returns the values of train/loss in the files."""
    match tracker:
        case "swanlab":  # a binary log, of which the number of entries is read
            logs = [path.read_bytes() for path in sorted(folder.rglob("*.swanlab"))]
            return [float(log.count(b"train/loss")) for log in logs]
        case "comet_ml":
            archives = [zipfile.ZipFile(path).read("messages.json") for path in (folder / "comet").glob("*.zip")]
            messages = [json.loads(line)["payload"] for archive in archives for line in archive.splitlines()]
            metrics = [message["metric"] for message in messages if "metric" in message]
            return sorted(metric["metricValue"] for metric in metrics if metric["metricName"] == "train/loss")
        case _:
            return sorted(value for metric in aim_metrics(folder) for value in metric.values.sparse_list()[1])


def aim_metrics(folder: Path) -> list[Any]:
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    manager = RepoIndexManager.get_index_manager(aim.Repo(str(folder)))
    (run,) = aim.Repo(str(folder)).list_all_runs()
    manager.index(run)
    found = aim.Repo(str(folder)).query_metrics("metric.name == 'train/loss'").iter_runs()
    return [metric for collection in found for metric in collection]


if __name__ == "__main__":
    name, path = sys.argv[1], Path(sys.argv[2])
    start(path, name, range(1, 4))  # type: ignore[arg-type]
    start(path, name, range(4, 6))  # type: ignore[arg-type]
    content = everything_below(path)
    ids = json.loads((path / "trackers.json").read_text())
    print(json.dumps({"losses": losses_of(name, path), "ids": ids, "has_secret": b"s3cr3t" in content}))
