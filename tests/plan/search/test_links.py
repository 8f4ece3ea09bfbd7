"""Measured links: what fits the times, which files are refused, and what `mtrain plan` makes of them."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mtrain.base.errors import ConfigError, DataError
from mtrain.plan.search.hardware import (
    GPUS,
    Cluster,
    Collective,
    Group,
    MeasuredLinks,
    MeasuredTransfer,
    Pair,
    gathered,
    known_gpu,
    read_links,
)
from mtrain.verify.machine.links import fitted, link_lines, predicted, slow_pairs
from tests.cli.command_line import call
from tests.messages import refuses
from tests.paths import CONFIGS

LINKS = MeasuredLinks(
    created="2026-11-28T12:00:00+00:00",
    device="NVIDIA H100 80GB HBM3",
    num_ranks=4,
    bandwidth=200e9,
    latency_s=20e-6,
    transfers=(MeasuredTransfer("all_reduce", 1 << 28, 2.1e-3, 1.1e-3),),
    pairs=(Pair(0, 1, 1 << 26, 4e-4), Pair(1, 0, 1 << 26, 1.3e-3)),
)


def written(folder: Path, links: object = LINKS) -> Path:
    """Writes a file in which `plan` finds these links."""
    content = asdict(links) if isinstance(links, MeasuredLinks) else links
    (folder / "machine.json").write_text(json.dumps({"created": LINKS.created, "links": content}))
    return folder / "machine.json"


def times(cluster: Cluster, num_ranks: int, sizes: list[int]) -> list[MeasuredTransfer]:
    return [
        MeasuredTransfer(each, size, predicted(each, cluster, num_ranks, size).seconds, None)
        for each in get_args(Collective)
        for size in sizes
    ]


@given(
    st.floats(1e8, 1e12),
    st.floats(1e-7, 1e-3),
    st.integers(2, 16),
    st.lists(st.integers(10, 30), min_size=2, unique=True),
)
def test_times_of_the_model_give_its_numbers_back(
    bandwidth: float, latency_s: float, num_ranks: int, powers: list[int]
) -> None:
    gpu = replace(GPUS["h100"], nvlink_bandwidth=bandwidth / 0.8)
    cluster = Cluster(gpu, num_ranks, nvlink_latency_s=latency_s)
    found = fitted(times(cluster, num_ranks, [1 << each for each in powers]), num_ranks)
    # what neither number changes much in any time cannot be known
    spread = [each.seconds for each in times(cluster, num_ranks, [1 << each for each in powers])]
    assume(max(spread) > 1.5 * min(spread))
    assume(max(spread) < 1e6 * min(spread))
    assert found == pytest.approx((bandwidth, latency_s), rel=1e-3)


@given(st.integers(2, 16), st.lists(st.floats(1e-6, 10.0), min_size=5, max_size=5))
def test_any_times_give_numbers_that_a_plan_can_take(num_ranks: int, seconds: list[float]) -> None:
    transfers = [
        MeasuredTransfer(collective, 1 << (18 + number), each, None)
        for number, (collective, each) in enumerate(zip(get_args(Collective), seconds, strict=True))
    ]
    bandwidth, latency_s = fitted(transfers, num_ranks)
    assert 0 < bandwidth < math.inf
    assert 0 <= latency_s < math.inf


def test_a_file_gives_back_what_was_measured_with_its_fingerprint(tmp_path: Path) -> None:
    found = read_links(written(tmp_path))
    assert (found, found.fingerprint) == (LINKS, LINKS.fingerprint)
    others = [replace(LINKS, bandwidth=200e9 + 1), replace(LINKS, created="2026-11-28T12:00:01+00:00")]
    assert len({LINKS.fingerprint, *(each.fingerprint for each in others)}) == 3


@pytest.mark.parametrize("key", ["created", "device", "num_ranks", "bandwidth", "latency_s", "transfers", "pairs"])
@given(value=st.sampled_from([None, "", "nan", -1.0, True, [], {}, math.inf, "a\nb", 10**400, [[1]], [{"seconds": 1}]]))
def test_a_damaged_file_is_refused_by_name(key: str, value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    assume((key, value) not in (("transfers", []), ("pairs", []), ("device", "nan")))
    folder = tmp_path_factory.mktemp("damaged")
    with pytest.raises(DataError, match="--measured"):
        read_links(written(folder, {**asdict(LINKS), key: value}))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"links": null}', '{"links": []}', '{"links": {}}', "\x00", '{"links": {"format": 2}}']
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(text)
    with refuses(DataError, "--measured", "machine.json", "mtrain verify machine"):
        read_links(tmp_path / "machine.json")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", Path("/dev/null")):
        with refuses(DataError, "--measured"):
            read_links(path)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("cpu", None),
    ],
)
def test_names_of_devices_are_known(device: str, name: str | None) -> None:
    found = known_gpu(device)
    assert (None if found is None else found.name) == name


def test_transfers_within_a_node_take_the_measured_time_and_others_stay() -> None:
    assumed = Cluster(GPUS["h100"], gpus_per_node=4)
    found = assumed.measured(LINKS)
    assert gathered(found, Group(4, 1), 4e9).seconds == pytest.approx(20e-6 + 3e9 / 200e9)
    assert gathered(found, Group(4, 4), 4e9) == replace(
        gathered(assumed, Group(4, 4), 4e9), seconds=gathered(found, Group(4, 4), 4e9).seconds
    )
    assert (found.network_latency_s, found.gpu.network_bandwidth) == (30e-6, 50e9)


def test_links_of_other_devices_are_refused() -> None:
    for device, fact in (("cpu", "gloo"), ("NVIDIA H200", "--gpu h200")):
        with refuses(ConfigError, "--measured", fact):
            Cluster(GPUS["h100"]).measured(replace(LINKS, device=device))
    assert Cluster(GPUS["h100"]).measured(replace(LINKS, device="NVIDIA L40S")).links is not None


def test_measurements_stand_beside_the_assumption_and_slow_links_are_named() -> None:
    lines = list(link_lines(LINKS))
    assert lines[1] == "mtrain plan assumes for a h100: 360 GB/s, after 10 us"
    assert "all_reduce of 268 MB: 2.1 ms" in lines[2]
    assert lines[2].endswith("assumed 1.1 ms")
    assert lines[3].startswith("slow link: a message from rank 1 to rank 0 takes 3.2 times as long")
    assert slow_pairs(LINKS) == [LINKS.pairs[1]]


def test_plan_takes_a_measured_file_and_says_which(tmp_path: Path) -> None:
    asked = ("plan", CONFIGS / "model" / "llama3_8b.yaml", "--gpus", 8, "--seq-length", 4096, "--global-batch-size", 64)
    file, planned = written(tmp_path, replace(LINKS, bandwidth=20e9)), tmp_path / "planned.yaml"
    code, assumed = call(*asked, "--json")
    assert (code, json.loads(assumed)["links"]) == (0, None)
    code, text = call(*asked, "--measured", file, "--json")
    found = json.loads(text)
    assert (code, found["links"]["bandwidth"], found["gpu"]["nvlink_bandwidth"]) == (0, 20e9, 25e9)
    slower = found["choices"][0]["step_seconds"]["total"]
    assert slower > json.loads(assumed)["choices"][0]["step_seconds"]["total"]
    links = read_links(file)
    code, text = call(*asked, "--measured", file, "--write", planned)
    said = f"links in a node: {links}\n"
    assert f"on 2026-11-28 (fingerprint {links.fingerprint}): large transfers reach 20 GB/s, after 20 us" in said
    assert (code, said in text, said in planned.read_text()) == (0, True, True), text
    assert "NVLink 25 GB/s" not in text, "nobody measured the bandwidth before its efficiency"
    code, text = call(*asked, "--measured", file, "--nvlink-gbs", 100)
    assert (code, "--measured and --nvlink-gbs" in text) == (2, True)
    code, text = call(*asked, "--measured", tmp_path / "nowhere")
    assert (code, text.count("\n")) == (3, 1)
