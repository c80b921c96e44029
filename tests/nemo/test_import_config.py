"""Import of NeMo-RL files: the result is complete and minimal, and every key that changed is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.config_page import rules_markdown
from tests.nemo.upstream_file import NEMO_FILE

from raylane.errors import ConfigError
from raylane.nemo.dialect import NEMO_RL
from raylane.nemo.import_config import import_config
from raylane.sft.config.load import load_config

PAGE = Path(__file__).parents[2] / "docs/howto/from-nemo-rl.md"


@pytest.fixture
def their_file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(NEMO_FILE)
    return path


def complete(tmp_path: Path) -> list[str]:
    """Return the overrides that complete the file: local data, a local model, a template with marks."""
    (tmp_path / "model").mkdir()
    words = [f"data.{name}.dataset_name=ResponseDataset" for name in ("train", "validation")]
    words += [f"data.{name}.data_path={tmp_path}/{name}.jsonl" for name in ("train", "validation")]
    return [*words, f"policy.model_name={tmp_path}/model", "policy.tokenizer.chat_template=llama3"]


def test_import_names_what_is_missing(their_file: Path) -> None:
    made = import_config(their_file)
    assert made.document["data"]["train"] == "???"
    told = "\n".join(made.to_do)
    for words in (
        "data.train.dataset_name='squad' is a data set that NeMo-RL downloads",
        "data.validation.dataset_name='squad'",
        "policy.tokenizer.chat_template has neither {% generation %}",
    ):
        assert words in told
    assert len(made.to_do) == 3
    assert made.document["policy"]["model_name"] == "hf:some/model"
    assert not made.refused
    text = made.yaml("theirs.yaml")
    assert text.startswith(
        "# Written by raylane import-config from theirs.yaml\n# TO DO: data.train.dataset_name='squad'"
    )
    assert yaml.safe_load(text) == made.document


def test_import_with_own_data_is_complete_and_loads_equally(their_file: Path, tmp_path: Path) -> None:
    words = complete(tmp_path)
    made = import_config(their_file, words)
    assert made.to_do == ()
    (tmp_path / "ours.yaml").write_text(made.yaml("theirs.yaml"))
    ours = load_config(tmp_path / "ours.yaml")
    assert ours == load_config(their_file, words, NEMO_RL)
    assert (ours.data.input_key, ours.data.output_key) == ("input", "output")
    assert "train_micro_batch_size" in made.document["policy"]
    assert "enabled" not in made.document["checkpointing"]  # it is the default


def test_import_reports_every_key_that_it_removed(their_file: Path, tmp_path: Path) -> None:
    made = import_config(their_file, complete(tmp_path))
    reported = {note.key for note in made.notes}
    theirs = yaml.safe_load(NEMO_FILE)

    def leaves(section: dict, prefix: str) -> list[str]:
        return [
            leaf
            for key, value in section.items()
            for leaf in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"])
        ]

    kept = set(leaves(made.document, ""))
    config = load_config(their_file, [f"policy.model_name={tmp_path}/model", *own_data(tmp_path)], NEMO_RL)
    for key in leaves(theirs, ""):
        parents = {key.rsplit(".", n)[0] for n in range(key.count(".") + 1)}
        assert key in kept or parents & reported or _is_default(config, key), key


def own_data(tmp_path: Path) -> list[str]:
    return [f"data.train={tmp_path}/t", f"data.validation={tmp_path}/v"]


def _is_default(config: object, key: str) -> bool:
    """Return True if the schema has this key, so that the import left it out only because of its value."""
    here = config
    for part in key.split("."):
        if not hasattr(here, part):
            return False
        here = getattr(here, part)
    return True


def test_import_separates_lacking_features_from_decisions(their_file: Path, tmp_path: Path) -> None:
    lacking = ["policy.dtensor_cfg.moe_parallelizer=true", "logger.mlflow_enabled=true", "++policy.new_thing=3"]
    made = import_config(their_file, [*complete(tmp_path), *lacking[:2]])
    assert [problem.key for problem in made.refused] == [
        "policy.dtensor_cfg.moe_parallelizer",
        "logger.mlflow_enabled",
    ]
    assert made.to_do == ()
    decisions = [
        "policy.quant_cfg=fp8",
        "policy.megatron_cfg={enabled: true, optimizer: {lr: 1.0e-4, weight_decay: 0.1}}",
    ]
    decisions += ["policy.megatron_cfg.scheduler={lr_decay_style: WSD}"]
    made = import_config(their_file, [*own_data(tmp_path), *decisions])
    assert any("quantization is not supported" in one for one in made.to_do)
    assert any("lr_decay_style=WSD cannot be expressed" in one for one in made.to_do)
    with pytest.raises(ConfigError, match=r"unknown key 'policy\.new_thing'"):
        import_config(their_file, lacking)


def test_import_leaves_out_unknown_keys_of_the_file(their_file: Path, tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text("defaults: theirs.yaml\npolicy: {brand_new: 3}\nsft: {val_period: abc}\n")
    made = import_config(tmp_path / "top.yaml", complete(tmp_path))
    assert [problem.key for problem in made.refused] == ["policy.brand_new"]
    assert any("sft.val_period" in one for one in made.to_do)


def test_import_names_unknown_keys_of_a_section_once(their_file: Path, tmp_path: Path) -> None:
    """Recipes of another day have a dozen keys that the table does not have; each made a line of its own."""
    text = "defaults: theirs.yaml\npolicy: {dtensor_cfg: {new_a: 1, new_b: 2}, tokeniser: {}}\n"
    (tmp_path / "top.yaml").write_text(text)
    refused = [problem.text for problem in import_config(tmp_path / "top.yaml", complete(tmp_path)).refused]
    assert [text for text in refused if "new_a" in text] == [text for text in refused if "new_b" in text]
    assert any(
        "policy.dtensor_cfg: unknown keys new_a, new_b. The file may be of another version" in t for t in refused
    )
    assert any("did you mean 'policy.tokenizer'" in text for text in refused)


def test_import_of_a_file_without_data_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sft: {max_num_steps: 3}\npolicy: {model_name: '???'}\n")
    made = import_config(tmp_path / "a.yaml")
    assert made.document["data"]["train"] == "???"
    assert any("data.train is not set" in one for one in made.to_do)
    assert any("policy.model_name is ???" in one for one in made.to_do)


def test_comment_of_the_new_file_stays_a_comment(tmp_path: Path) -> None:
    made = import_config_of_text(tmp_path, 'policy: {model_name: "a\\nsft: {seed: 1}"}')
    assert yaml.safe_load(made.yaml("odd\nname.yaml")) == made.document
    assert "seed" not in made.document["sft"]


def import_config_of_text(tmp_path: Path, text: str):
    (tmp_path / "a.yaml").write_text(text)
    return import_config(tmp_path / "a.yaml")


def test_how_to_page_shows_a_real_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/llama-3.2-1b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    file, report = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("yaml", "text"))
    Path("nemo_sft.yaml").write_text(file)
    assert import_config("nemo_sft.yaml").report() + "\n" == report
    assert not import_config("nemo_sft.yaml", (), {"squad": "squad.jsonl"}).to_do


def test_reference_page_has_the_table_of_rules() -> None:
    page = PAGE.parents[1] / "reference" / "nemo-rl-keys.md"
    assert rules_markdown() in page.read_text(), "replace the table by the result of tests.config_page.rules_markdown()"
