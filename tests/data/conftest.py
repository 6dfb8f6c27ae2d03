"""A tokenizer without files: one id per byte, so that every expected id can be written by hand."""

import pytest


class ByteTokenizer:
    """Quacks like a Hugging Face tokenizer as far as trisect.data looks."""

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool):
        assert not add_special_tokens
        assert not verbose
        return {"input_ids": list(text.encode("utf-8"))}

    def batch_decode(self, batch: list[list[int]], *, clean_up_tokenization_spaces: bool):
        assert not clean_up_tokenization_spaces
        return [bytes(ids).decode("utf-8") for ids in batch]


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()
