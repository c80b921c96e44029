"""Schema of the configuration of a fine-tuning run: the sections `sft` and `data`, and the tree of all sections.

The sections that every training has, and the rules of all of them, are in `raylane.training.config.schema`.
`docs/reference/sft-config.md` is generated from the descriptions of both modules.

B = rows in a batch, T = `policy.max_total_sequence_length` = the fixed length of a row in tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from raylane.training.config.policy import Fraction, NaturalInt, PositiveFloat, PositiveInt, Section
from raylane.training.config.schema import LoopConfig, TrainingConfig


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Path)) else value


class SftConfig(LoopConfig):
    """Length of the training loop, validation, and the way steps are sent to the workers."""

    steps_in_flight: PositiveInt = 2
    """Number of steps that the driver sends before it waits for the metrics of the oldest one. 2 keeps the workers busy
    while the driver reads metrics; 1 waits for each step. Not in NeMo-RL."""
    max_num_steps: PositiveInt | None = None
    """Maximum number of optimizer steps; null means no limit. The run ends at the first of the two limits, this one and
    max_num_epochs."""
    max_num_epochs: PositiveInt | None = 1
    """Maximum number of passes over the training data; null means no limit. The run ends at the first of the two
    limits, this one and max_num_steps."""
    val_period: NaturalInt = 0
    """Number of steps between two validations; 0 (the default, because a validation set is optional) means no
    validation during training."""
    val_batches: NaturalInt = 0
    """Maximum number of batches in one validation; 0 means the whole validation set."""
    val_global_batch_size: PositiveInt = 8
    """Number of rows in one validation batch, summed over all workers."""
    val_micro_batch_size: PositiveInt = 8
    """Number of validation rows that one worker runs through the model at once."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    feed: Literal["workers", "driver"] = "workers"
    """Process that reads the training data. workers: the driver sends a step number, and each worker reads its own
    rows; driver: the driver reads all rows and sends them. Not in NeMo-RL, which behaves as driver."""
    sample_prompts: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    """Questions that the model answers at every validation; the answers are in metrics.jsonl and in the report. Not in
    NeMo-RL."""
    sample_tokens: PositiveInt = 32
    """Maximum number of tokens in each of these answers. Each token takes one forward pass. Not in NeMo-RL."""


class DataSource(Section):
    """Rows of one file, folder or data set, for training or validation."""

    path: str = Field(min_length=1)
    """File, glob, folder, URL, or name of a data set on the Hugging Face hub."""
    split: str | None = None
    """Split of a folder or of a data set on the hub; null means train, and for data.validation validation."""
    subset: str | None = None
    """Subset (also called configuration) of a data set on the hub; null means its only one."""


class TrainSource(DataSource):
    """Rows of one file, folder or data set, and their weight."""

    weight: PositiveFloat = 1.0
    """Number of times that its rows are used in an epoch."""


class DataConfig(Section):
    """The data to train on: conversations or texts. Paths start at the working directory."""

    train: Annotated[tuple[str | TrainSource, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
    """File (JSON Lines, a JSON array, CSV, TSV, Parquet, Arrow or plain text, also compressed), glob, folder, URL (e.g.
    s3://bucket/file.jsonl) or name on the Hugging Face hub; or a list of these and of {path, split, subset, weight}.
    weight is the number of times that the rows are used in an epoch: 2 uses each row twice, 0.5 uses one half of the
    rows in an epoch and the other half in the next one; a path alone has weight 1. If a weight is not 1, each entry is
    packed by itself. NeMo-RL: data.train.data_path, which is accepted too."""
    validation: str | DataSource | None = None
    """The same, one entry, for validation only; null means none. If validation_fraction is 0 too, nothing is validated,
    whatever sft.val_period, val_at_start and val_at_end are. NeMo-RL: data.validation.data_path, which is accepted
    too."""
    validation_fraction: Fraction = 0.0
    """Fraction of the training data to hold out for validation. The choice depends only on a hash of each conversation,
    so duplicates stay on one side and the seed does not matter. NeMo-RL: data.train.split_validation_size."""
    shuffle: bool = True
    """Read the rows in a new order in each epoch; the order depends on sft.seed and the epoch."""
    group_by_length: bool = False
    """Put rows of about the same length into the same global batch, which leaves little padding without packing. Each
    epoch still uses each row as often; batches exchange rows with the 50 batches around them. Losses of successive
    steps then vary more, because short and long conversations are learned in different steps. TrainingArguments of
    Hugging Face have the same key, NeMo-RL has none."""
    overlong: Literal["truncate", "drop", "split", "error"] = "truncate"
    """Treatment of a conversation of more than T tokens. truncate: the tail is cut off; drop: the conversation is left
    out; split: the conversation becomes pieces of T tokens that overlap by one token; error: the run is refused.
    Affected conversations are always counted and reported."""
    cache_dir: str = "runs/cache"
    """Folder of token caches and trained tokenizers."""
    allow_unsupervised: bool = False
    """Leave out (and count) conversations without any supervised token. false refuses such data, because they usually
    mean a wrong chat template."""
    check_masks: bool = True
    """Compare the supervised text with the assistant's messages in the first 1,000 conversations, and refuse data where
    the two disagree. Read the output of `raylane inspect-data` before setting this key to false."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """Treatment of a row that cannot be used, or of which a part would be lost. stop: the run is refused, and the place
    of the row is named; skip: the row is left out, counted and reported. Not in NeMo-RL."""
    num_proc: PositiveInt | None = None
    """Number of processes that tokenise; null means one for each 20,000 rows, at most the number of CPUs, and at most
    8. Not in NeMo-RL."""
    prompt: str | None = None
    """Text with {} in the place of the user's first message, or a file with one; null leaves messages as they are.
    NeMo-RL: prompt_file of a data set."""
    messages_key: str = "messages"
    """Key of the list of messages in each row. NeMo-RL: chat_key."""
    input_key: str | None = None
    """Key of the user's text in rows without messages_key, which hold one question and one answer; null means that the
    layout of a row is found by its columns. Needs output_key."""
    output_key: str | None = None
    """Key of the assistant's text in lines without messages_key. Needs input_key."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of rows that hold nothing to learn from. Without them a row is refused if it holds a text that no message
    has, e.g. a context beside a question, or a column named as a mark, e.g. loss; keys that nothing reads are named in
    a warning. Not in NeMo-RL."""

    @model_validator(mode="after")
    def _keys_that_fit(self) -> DataConfig:
        # Here and not in `layout`: these keys need nothing of other sections.
        if self.validation is not None and self.validation_fraction:
            raise ValueError(
                f"validation={self.validation!r} and validation_fraction={self.validation_fraction} are both set; "
                "remove one"
            )
        if (self.input_key is None) != (self.output_key is None):
            raise ValueError(
                f"input_key={self.input_key!r} and output_key={self.output_key!r} must both be set, or both be null"
            )
        return self

    @property
    def train_sources(self) -> tuple[TrainSource, ...]:
        """Entries of `train`."""
        return tuple(TrainSource(path=entry) if isinstance(entry, str) else entry for entry in self.train)

    @property
    def validation_source(self) -> DataSource | None:
        """Entry of `validation`."""
        entry = self.validation
        return DataSource(path=entry) if isinstance(entry, str) else entry

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """All entries, those of training first."""
        held = self.validation_source
        return (*self.train_sources, *(() if held is None else (held,)))

    @property
    def train_weights(self) -> tuple[float, ...]:
        """Weights of the entries of `train`."""
        return tuple(source.weight for source in self.train_sources)

    @property
    def has_validation(self) -> bool:
        """True if a validation set is configured."""
        return self.validation is not None or self.validation_fraction > 0


class SftRunConfig(TrainingConfig):
    """The complete configuration of a fine-tuning run."""

    loop_name: ClassVar[str] = "sft"
    order: ClassVar[tuple[str, ...]] = ("sft", "policy", "data", "checkpointing", "logger", "cluster")
    """Names of the sections, in the order of files and documentation."""

    sft: SftConfig = Field(default_factory=SftConfig)
    """Training loop."""
    data: DataConfig
    """Conversations to train on."""

    @property
    def steps_in_flight(self) -> int:
        """Number of steps that the driver sends before it waits for the metrics of the oldest one."""
        return self.sft.steps_in_flight

    @property
    def loop(self) -> SftConfig:
        """Settings of the training loop."""
        return self.sft
