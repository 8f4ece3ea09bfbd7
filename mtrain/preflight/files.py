"""Checks that the files that a configuration names exist, are complete, and fit the model."""

from pathlib import Path
from typing import assert_never

from mtrain.arch.parameters import padded_vocab_size
from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.derived import compared, label_columns
from mtrain.config.schema.data import FilesSection, IndexedSection, MockSection, SftSection
from mtrain.core.batch.sample import SampleEncoder, TokenizedSample
from mtrain.data.formats.megatron_indexed import check_pair
from mtrain.data.sources import check_own_tokenizer
from mtrain.hf.tokenizer.tokenizer import Tokenizer, check_vocabulary, tokenizer_of
from mtrain.preflight.findings import Findings


def look_at_files(config: Config, findings: Findings) -> None:
    """Opens every data and tokenizer file that a run would open, so that one check finds all faults.

    Reads the index of an indexed corpus and a few of its tokens, and encodes the first record of each record file with
    the run's chat template.
    """
    tokenizer = None
    if config.data.tokenizer is not None:
        with findings.looking():
            tokenizer = tokenizer_of(config)
            check_vocabulary(tokenizer, config.model.vocab_size)
            check_own_tokenizer(config, tokenizer)
            vocab_size, tp = config.model.vocab_size, config.layout.tp
            rows = f"{counted(padded_vocab_size(config.model, tp), 'row', ',')} with padding for tp {tp}"
            tokens = f"{counted(tokenizer.vocab_size, 'token', ',')} of model.vocab_size={vocab_size:,} ({rows})"
            findings.fact("tokenizer", f"{tokenizer.path}: {tokens}")
    match config.data:
        case MockSection():
            pass
        case IndexedSection():
            for path in source_paths(config.data):
                with findings.looking():
                    pair = check_pair(path, config.model.vocab_size)
                    findings.fact(
                        "corpus",
                        f"{path}: {counted(pair.num_documents, 'document', ',')}, "
                        f"{counted(pair.num_tokens, 'token', ',')}",
                    )
        case SftSection():
            if tokenizer is not None:
                _look_at_records(config, config.data, tokenizer, findings)
        case _:
            assert_never(config.data)
    if config.eval.has_prompts and tokenizer is not None:
        with findings.looking():
            from mtrain.training.sampling.prompts import questions_of, read_prompts  # jinja2, as below

            section = config.eval
            further = [] if section.prompts_file is None else read_prompts(Path(section.prompts_file))
            folder = Path(section.prompts_file or ".").parent
            questions = questions_of(config, tokenizer, [*section.prompts, *further], section.chat, folder=folder)
            longest = max(len(question.ids) for question in questions)
            findings.fact("prompts", f"{len(questions)} of eval, the longest of {counted(longest, 'token')}")


def source_paths(data: FilesSection) -> list[str]:
    held_out = [section for sections in data.valid_sets.values() for section in sections]
    return list(dict.fromkeys(source.path for source in (*data.all_sources, *held_out, *data.test)))


def _look_at_records(config: Config, data: SftSection, tokenizer: Tokenizer, findings: Findings) -> None:
    vocab_size, compares = config.model.vocab_size, compared(config.loss, data)
    from mtrain.data.encoding.compared import (
        image_processor,
        source_encoder,  # loads jinja2 and its limited process, which pretraining does not need
    )
    from mtrain.data.formats.record_files import RecordFile, chunks, left_out, source_files

    encoder = None
    with findings.looking():
        is_number = bool(label_columns(config.loss))
        images = image_processor(data, config.model)
        encoder = source_encoder(data, tokenizer, compares, config.model.head, is_number, images)
    if encoder is None:
        return

    def look(path: str, file: RecordFile) -> None:
        chunk = next(chunks([file]), None)
        if chunk is None:
            raise DataError(f"{file.path} has no records; leave it out of {path}")
        try:
            encoded = encoder.encode(chunk.record(0), file.path.parent)
        except DataError as fault:
            if data.on_bad == "refuse":
                raise DataError(f"{file.place(1)}: {fault}") from None
            findings.fact("records", f"{path}: the first record is bad and will be left out: {fault}")
            return
        highest = max(int(sample.ids.max()) for sample in _sequences(encoded))
        if highest >= vocab_size:
            raise DataError(
                f"{file.place(1)} contains token {highest}, but model.vocab_size is {vocab_size}; use the model's "
                "own tokenizer or raise model.vocab_size"
            )

    for path in source_paths(data):
        with findings.looking():
            files, empty = source_files(path)
            for file in files:
                look(path, file)
            if empty:
                findings.fact("records", f"{path}: {left_out(empty)}")
            template = "" if data.chat_template == "auto" else f", chat template {data.chat_template}"
            findings.fact("records", f"{path}: {len(files)} file(s), the first record of each is a sample{template}")
    if not findings.faults:
        with findings.looking():
            if not _is_learnable(data, encoder):
                from mtrain.data.sources import Sources  # loads numpy and the token cache, which few checks need

                Sources(config).training()


def _is_learnable(data: SftSection, encoder: SampleEncoder) -> bool:
    """Returns whether one of the first records has tokens to learn."""
    from mtrain.data.formats.record_files import chunks, record_files

    for source in data.all_sources:
        files = record_files(source.path)
        chunk = next(chunks(files))
        for index in range(len(chunk)):
            try:
                sample = encoder.encode(chunk.record(index), files[chunk.file].path.parent)
            except DataError:
                continue  # opening the data reports bad records
            # a record that fits its row has tokens to learn, unless its weight is 0
            if any(sequence.weight and len(sequence.ids) <= data.seq_length + 1 for sequence in _sequences(sample)):
                return True
    return False


def _sequences(sample: TokenizedSample | tuple[TokenizedSample, ...]) -> tuple[TokenizedSample, ...]:
    return sample if isinstance(sample, tuple) else (sample,)
