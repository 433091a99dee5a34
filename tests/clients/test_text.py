"""The page on text, with a tiny language model with random weights."""

import string

import pytest
import torch
from test_docs import ROOT, RST, run

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

PAGE = ROOT / "docs" / "user_guide" / "text.rst"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Save a model and a tokenizer that reads characters; work next to the folder."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder = tmp_path / "all-MiniLM-L6-v2"
    vocab = {c: i for i, c in enumerate(["[PAD]", "[UNK]", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=64,
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.usefixtures("folder")
def test_the_page_runs_from_top_to_bottom(figure):
    with torch.random.fork_rng():
        printed = run(PAGE, RST).splitlines()
    shares = {}
    for line in printed:
        if "flagged" in line:
            name, share = line.split("%")[0].rsplit(maxsplit=1)
            shares[name.rsplit(maxsplit=1)[0]] = float(share) / 100
    # the letters alone tell Russian from English
    assert shares["sphinx, in ru"] > 0.9
    assert shares["test"] < 0.15
    figure(test=shares["test"], russian=shares["sphinx, in ru"])
