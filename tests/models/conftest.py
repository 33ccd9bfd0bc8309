"""Random models of the right shape (two layers, 32 wide), saved as folders: what a hub would give, without a hub."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

WORDS = "reset admin password license expired backup restore 重 置 管 理 员 密 码 证 书 过 期 . , ? : 1 2 3".split()


def save_tokenizer(folder: Path, max_length: int) -> int:
    """A tokenizer of whole words between blanks, with XLM-R's special tokens; returns its size."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", cls_token="<s>", eos_token="</s>", sep_token="</s>",
        pad_token="<pad>", unk_token="<unk>", mask_token="<mask>", model_max_length=max_length,
    ).save_pretrained(folder)  # fmt: skip
    return len(vocabulary)


def tiny_config(folder: Path, max_length: int, **options):
    from transformers import XLMRobertaConfig

    return XLMRobertaConfig(
        vocab_size=save_tokenizer(folder, max_length), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=max_length + 2, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        type_vocab_size=1, **options,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_bge_m3(tmp_path_factory) -> Path:
    """A folder shaped like BAAI/bge-m3: encoder, tokenizer, sparse and ColBERT heads."""
    import torch
    from transformers import XLMRobertaModel

    folder = tmp_path_factory.mktemp("tiny-bge-m3")
    torch.manual_seed(0)
    XLMRobertaModel(tiny_config(folder, 64)).save_pretrained(folder)
    torch.save(torch.nn.Linear(32, 32).state_dict(), folder / "colbert_linear.pt")
    torch.save(torch.nn.Linear(32, 1).state_dict(), folder / "sparse_linear.pt")
    return folder


@pytest.fixture(scope="session")
def tiny_reranker(tmp_path_factory) -> Path:
    """A folder shaped like BAAI/bge-reranker-v2-m3: a sequence classifier with one label."""
    import torch
    from transformers import XLMRobertaForSequenceClassification

    folder = tmp_path_factory.mktemp("tiny-reranker")
    torch.manual_seed(1)
    XLMRobertaForSequenceClassification(tiny_config(folder, 512, num_labels=1)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quiet_models():
    """Model libraries change log levels; put them back."""
    before = {name: logging.getLogger(name).level for name in ("transformers", "sentence_transformers")}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
