"""Faults of schedules, layers and models that are not implemented: their fields are refused.

When one is implemented, its rows get an outcome, and tests, of their own.
"""

from __future__ import annotations

from tests.known_issues.rows.row import KnownIssue, Place, has_field

_REFUSED = "Its fields are refused."
_MODULES = ("mtrain/config/megatron_fields.py", "mtrain/config/schema/layout.py")
_TESTS = ("tests/config/test_megatron_fields.py::test_other_fields_are_refused",)


def _refused(
    name: str,
    fault: str,
    places: tuple[Place, ...],
    fields: tuple[str, ...],
    value: object,
    findings: tuple[int, ...] = (),
) -> KnownIssue:
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
        findings=findings,
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
    _refused(
        "output norm of gated delta layers",
        "Every tensor-parallel rank has a copy of its weight and the gradient of its own heads; without sequence "
        "parallelism these gradients are not summed, and the copies part.",
        (
            Place("ssm/gated_delta_net.py", "GatedDeltaNet.__init__", "submodules.out_norm,", "0.16.1"),
            Place("ssm/gated_delta_net/common.py", "_GDNBase.__init__", "submodules.out_norm,", "0.19.2"),
        ),
        ("experimental_attention_variant",),
        "gated_delta_net",
        (11,),
    ),
    KnownIssue(
        "embeddings of images cut by other ranks' groups",
        "The model with images cuts its embeddings for sequence parallelism by the global tensor-parallel group, where "
        "its language model uses the one that it was given.",
        (
            Place(
                "models/multimodal/llava_model.py",
                "LLaVAModel._process_embedding_token_parallel",
                "combined_embeddings = tensor_parallel.scatter_to_sequence_parallel_region(",
            ),
        ),
        "a LLaVAModel, which no configuration makes",
        lambda config, layout: False,
        "absent",
        "No model of megatron-core's is built, only layers of it.",
        ("mtrain/core/layers/language_model.py",),
        ("tests/known_issues/test_table.py::test_no_model_of_theirs_is_built",),
        findings=(7,),
    ),
    KnownIssue(
        "layers of Megatron-FSDP's checkpoints numbered by stage",
        "Its checkpoints name a layer by its number on its stage, so that a load with another pipeline size puts "
        "layers in the places of others without an error.",
        (
            Place(
                "distributed/fsdp/mcore_fsdp_adapter.py",
                "FullyShardedDataParallel.__init__",
                "self.state_dict_for_save_checkpoint = self.state_dict",
            ),
        ),
        "Megatron-FSDP, which no configuration turns on",
        lambda config, layout: False,
        "absent",
        "Megatron-FSDP is not used; layers have their numbers in the whole model in every checkpoint.",
        ("mtrain/core/layers/build.py", "mtrain/core/layers/layer_spec.py"),
        (
            "tests/known_issues/test_table.py::test_megatron_fsdp_is_not_used",
            "tests/core/state/test_save_and_load.py::test_another_layout_gets_the_same_bits_and_trains_alike",
        ),
        findings=(12,),
    ),
)
