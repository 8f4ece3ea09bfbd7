"""Faults in saving and loading."""

from __future__ import annotations

from tests.known_issues.rows.row import KnownIssue, Place, always, issue_test

_WRITER = "dist_checkpointing/strategies/filesystem_async.py"
_CHECKPOINT_TESTS = "tests/core/state/test_save_and_load.py"

ROWS = (
    KnownIssue(
        "checkpoint form without metadata",
        "The distributed optimizer's default form of a checkpoint is one that its own checkpoints no longer accept.",
        (
            Place(
                "optimizer/distrib_optimizer.py",
                "DistributedOptimizer.sharded_state_dict",
                "'distrib_optim_sharding_type', 'fully_sharded_model_space'",
            ),
            Place(
                "dist_checkpointing/mapping.py",
                "ShardedTensor.validate_metadata_integrity",
                "if self.flattened_range is not None:",
            ),
        ),
        "the distributed optimizer, saved without metadata",
        lambda config, layout: config.train.distributed_optimizer,
        "fixed",
        "Weights, main weights and moments are whole tensors under names that do not depend on the layout.",
        ("mtrain/core/engine/training_state.py", "mtrain/core/layers/sharded_parameters.py"),
        (
            issue_test("the_default_checkpoint_form_cannot_be_saved"),
            f"{_CHECKPOINT_TESTS}::test_another_layout_gets_the_same_bits_and_trains_alike",
        ),
    ),
    KnownIssue(
        "helper processes in a save",
        "A save spawns a manager on each rank, which imports the main script again, and forks writers, for whose end "
        "it waits for ever if one is killed.",
        (
            Place(_WRITER, "_get_write_results_queue", "_results_queue = ctx.Manager().Queue()", "0.16.1"),
            Place(_WRITER, "get_write_results_queue", "_results_queue = ctx.Manager().Queue()", "0.19.2"),
            Place(_WRITER, "FileSystemWriterAsync.write_preloaded_data_multiproc", "count_queue.join()", "0.16.1"),
        ),
        "checkpoints",
        always,
        "fixed",
        "Ranks write their own shards; no process is started.",
        ("mtrain/checkpoint/state/save.py", "mtrain/checkpoint/format/writer.py"),
        (
            issue_test("a_save_of_theirs_starts_processes"),
            f"{_CHECKPOINT_TESTS}::test_saving_needs_no_helper_process",
        ),
    ),
    KnownIssue(
        "psutil",
        "The writers need psutil, which is not declared; without it they end with an error and the save hangs.",
        (
            Place(
                _WRITER,
                "_process_memory",
                'raise RuntimeError("psutil is not installed, please install it with `pip install psutil`")',
            ),
        ),
        "checkpoints where psutil is absent",
        always,
        "fixed",
        "Saving does not use it.",
        ("mtrain/checkpoint/state/save.py", "mtrain/checkpoint/format/writer.py"),
        (
            issue_test("their_writer_needs_psutil"),
            f"{_CHECKPOINT_TESTS}::test_saving_needs_no_helper_process",
        ),
    ),
    KnownIssue(
        "checkpoints run code",
        "The metadata and every object besides the tensors are unpickled, which runs whatever they name.",
        (
            Place(
                "dist_checkpointing/strategies/torch.py",
                "_get_filesystem_reader",
                "return FileSystemReader(checkpoint_dir)",
            ),
        ),
        "checkpoints from elsewhere",
        always,
        "fixed",
        "Only the plain classes of such a list are let through, and no other object is read.",
        ("mtrain/checkpoint/format/safe_metadata.py",),
        (
            issue_test("a_checkpoint_runs_code_in_their_reader_and_not_in_ours"),
            f"{_CHECKPOINT_TESTS}::test_nothing_of_a_checkpoint_runs_as_code",
        ),
    ),
)
