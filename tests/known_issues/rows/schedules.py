"""Faults of schedules that are not implemented: their fields are refused.

When one is implemented, its rows get an outcome, and tests, of their own.
"""

from __future__ import annotations

from tests.known_issues.rows.row import KnownIssue, Place, has_field

_REFUSED = "Its fields are refused."
_MODULES = ("mtrain/config/megatron_fields.py", "mtrain/config/schema/layout.py")
_TESTS = ("tests/config/test_megatron_fields.py::test_other_fields_are_refused",)


def _refused(name: str, fault: str, places: tuple[Place, ...], fields: tuple[str, ...], value: object) -> KnownIssue:
    """Makes a row whose fields all belong to something that is not implemented."""
    return KnownIssue(
        name,
        fault,
        places,
        ", ".join(fields),
        has_field(*fields),
        "refused",
        _REFUSED,
        _MODULES,
        _TESTS,
        tuple({field: value} for field in fields),
    )


ROWS = (
    _refused(
        "hybrid context parallelism",
        "Its schedule passes an argument in the place of the context-parallel size, so a two-part loss becomes 0.",
        (
            Place(
                "pipeline_parallel/hybrid_cp_schedule.py",
                "hybrid_context_parallel_forward_backward",
                "collect_non_loss_data,",
            ),
        ),
        ("hybrid_context_parallel",),
        True,
    ),
)
