"""What stands in a file's place is told by its beginning; no file of a model is taken for it."""

import pytest

from mlx_server.checkpoints.files import other_kind, other_than_weights

OTHERS = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:1": "Git LFS pointer",
    b"\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1": "Git LFS pointer",
    b"<!DOCTYPE html><html>": "web page",
    b"\n  <!doctype HTML>": "web page",
    b"<HTML lang=en>": "web page",
    b'<?xml version="1.0"?><Error><Code>AccessDenied': "as XML",
    b"<Error><Code>NoSuchKey</Code>": "as XML",
    b"GGUF\x03\0\0\0": "GGUF",
    b"PK\x03\x04\x14\0": "PyTorch",
    b"\x80\x02}q\0": "PyTorch",
    b"\x80\x04\x95": "PyTorch",
    b"\x1f\x8b\x08\0": "archive",
    bytes(128): "zeros",
    b"": "empty",
    b"\xef\xbb\xbf": "empty",
}
OWN = (
    b'\x58\x01\0\0\0\0\0\0{"__metadata__":{"format":"mlx"}',  # safetensors
    b"\x02\0\0\0\0\0\0\0{}",  # of no tensors
    b'{"model_type": "llama"}',
    b'\xef\xbb\xbf{\n  "version": "1.0"',
    b"[]",
    b"IQ== 0\nIg== 1\n",  # tiktoken
    b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02",  # SentencePiece
    b"{%- for message in messages -%}",
    b"<|im_start|>{{ messages }}",
    b"<s>{% if messages %}",
    b"<start_of_turn>",
    b"GGU",
)


@pytest.mark.parametrize("begin", OTHERS)
def test_another_kind_is_told(begin: bytes) -> None:
    for tell in (other_kind, other_than_weights):
        assert OTHERS[begin] in (tell(begin) or "")


@pytest.mark.parametrize("begin", OWN)
def test_a_models_file_is_none(begin: bytes) -> None:
    assert other_kind(begin) is None


@pytest.mark.parametrize("begin", OWN[:2])
def test_weights_are_weights(begin: bytes) -> None:
    assert other_than_weights(begin) is None


def test_a_text_for_weights_is_quoted() -> None:
    said = other_than_weights(b"Entry not found\nand more") or ""
    assert said.startswith("is text that begins with 'Entry not found'.")
