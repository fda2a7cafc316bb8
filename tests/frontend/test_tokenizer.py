"""Encoding equals transformers' (as ground truth), whatever file the tokenizer comes from; bad files are clear errors."""

from __future__ import annotations

import json
import random
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizer_zoo import ZOO, byte_level_bpe, random_text, sentencepiece_vocab, smollm2_path, wrap
from tokenizers import AddedToken, pre_tokenizers, processors

from octavo.errors import ModelError, RequestError
from octavo.frontend import gguf_tokenizer
from octavo.frontend.gguf_tokenizer import BYTE, CONTROL, NORMAL, PRE_TOKENIZERS, UNKNOWN, read_gguf_metadata
from octavo.frontend.gguf_tokenizer import USER_DEFINED as USER
from octavo.frontend.tokenizer import load_tokenizer
from tests.waiting import slowness


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(smollm2_path())


def from_transformers(path: str, gguf: bool = True):
    transformers = pytest.importorskip("transformers")
    file = Path(path)
    if gguf:
        return transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    return transformers.AutoTokenizer.from_pretrained(path)


# -- SmolLM2, the real file --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_truth():
    return from_transformers(smollm2_path())


def test_smollm2_equals_transformers(smollm2, smollm2_truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the vocabulary of this file but not its pre-tokenizer ("smollm": every digit by itself, then
    GPT-2's rule), which the model's own tokenizer.json has; with it the two are equal on every text."""
    backend = smollm2_truth.backend_tokenizer
    monkeypatch.setattr(backend, "pre_tokenizer", backend.pre_tokenizer)  # put back afterwards: the test below wants it
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    rng = random.Random(1)
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<reponame>"]
    for _ in range(4000):
        text = random_text(rng, specials)
        ids = smollm2.encode(text)
        assert ids == smollm2_truth.encode(text), repr(text)
        for skip in (True, False):
            assert smollm2.decode(ids, skip) == smollm2_truth.decode(ids, skip_special_tokens=skip)


def test_smollm2_equals_transformers_as_it_is_where_no_space_run_meets_a_digit(smollm2, smollm2_truth) -> None:
    truth = smollm2_truth
    rng = random.Random(2)
    for _ in range(1000):
        text = "".join(c for c in random_text(rng) if not c.isnumeric())
        assert smollm2.encode(text) == truth.encode(text), repr(text)
    for text in ("In 1984, 12 of 345 agreed (3.5%).", "x = 10\nfor i in range(20):\n"):
        assert smollm2.encode(text) == truth.encode(text)


def test_smollm2_facts(smollm2) -> None:
    assert smollm2.vocab_size == len(smollm2) == 49152
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.eos_token_id, smollm2.eos_token_ids) == ("<|im_start|>", "<|im_end|>", 2, (2,))
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.chat_template is not None and "<|im_start|>" in smollm2.chat_template
    assert smollm2.encode("<|im_start|>user") == [1, *smollm2.encode("user")]
    assert smollm2.id_to_token(1) == "<|im_start|>" and smollm2.token_to_id("<|im_start|>") == 1
    assert smollm2.id_to_token(49152) is None and smollm2.id_to_token(-1) is None and smollm2.id_to_token(2**70) is None


def test_smollm2_loads_quickly() -> None:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        load_tokenizer(smollm2_path())
        best = min(best, time.process_time() - start)
    assert best < 1.0 * slowness()  # measured: 0.15 s on a quiet machine


def test_token_bytes_are_exact(smollm2) -> None:
    rng = random.Random(5)
    for _ in range(500):
        text = random_text(rng)
        data = b"".join(smollm2.token_bytes(i) for i in smollm2.encode(text))
        if "\ufffd" not in smollm2.decode(smollm2.encode(text)):  # a few rare bytes are not in this vocabulary
            assert data == text.encode()
    assert smollm2.token_bytes(1) == b"<|im_start|>" and smollm2.token_bytes(60_000) == b""
    assert smollm2.pieces(True)[1] == b"" and smollm2.pieces(False)[1] == b"<|im_start|>"


def test_threads(smollm2) -> None:
    rng = random.Random(6)
    texts = [random_text(rng, size=200) for _ in range(50)]
    expected = [smollm2.encode(text) for text in texts]
    failures = []

    def work() -> None:
        for text, ids in zip(texts, expected):
            if smollm2.encode(text) != ids:
                failures.append(text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_long_and_short_texts_go_the_same_way(smollm2) -> None:
    text = "The quick brown fox <|im_end|> 12  "
    assert smollm2.encode(text * 40) == smollm2.backend.encode(text * 40).ids


def test_a_lone_surrogate_is_refused(smollm2) -> None:
    for text in ("a\ud800b", "\udc80" * 2000):
        with pytest.raises(RequestError, match="surrogate"):
            smollm2.encode(text)


def test_negative_ids_are_refused(smollm2) -> None:
    with pytest.raises(RequestError, match="-1"):
        smollm2.decode([1, -1])
    assert smollm2.decode([49152, 10**12]) == ""


def test_bad_words(smollm2) -> None:
    within, after_space = smollm2.encode_bad_word("damn")
    assert smollm2.decode(within) == "damn" and smollm2.decode(after_space) == " damn"
    assert smollm2.encode_bad_word("  damn") == [within, after_space]
    plain = wrap(ZOO["sentencepiece"]())
    words = plain.encode_bad_word("ab")
    assert [b"".join(plain.token_bytes(i) for i in ids) for ids in words] == [b"ab", b" ab"]


# -- GGUF files made here ----------------------------------------------------------------------------------------------


def write_gguf(path: Path, **values) -> str:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), values.pop("architecture", "llama"))
    for key, value in values.items():
        name = "tokenizer." + key if key.startswith("chat") else "tokenizer.ggml." + key
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def gpt2_values() -> dict:
    state = json.loads(byte_level_bpe(700).to_str())
    vocab = state["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    types = [CONTROL if token in ("<s>", "</s>") else NORMAL for token in tokens]
    tokens += ["<think>", "<|eot_id|>"]
    types += [USER, CONTROL]
    merges = [" ".join(merge) for merge in state["model"]["merges"]]
    return {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 0, "eos_token_id": 1}


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken", "gpt-4o", "gpt-2", "dbrx", None])
def test_pre_tokenizers_equal_transformers(pre: str | None, tmp_path: Path) -> None:
    values = gpt2_values()
    if pre is not None:
        values["pre"] = pre
    path = write_gguf(tmp_path / "m.gguf", **values)
    tokenizer, truth = load_tokenizer(path), from_transformers(path)
    variant = PRE_TOKENIZERS[pre or "default"]
    rng = random.Random(pre)
    import unicodedata

    for _ in range(600):
        text = random_text(rng, ["<s>", "</s>", "<think>", "<|eot_id|>"])
        text = unicodedata.normalize("NFC", text) if variant.nfc else text
        got = tokenizer.encode(text, add_special_tokens=False)
        expected = truth.encode(text, add_special_tokens=False)
        if got != expected and variant.ignore_merges:  # which transformers leaves out here: compare what it means
            assert tokenizer.decode(got, False) == truth.decode(expected)
        else:
            assert got == expected, repr(text)


def test_pre_tokenizer_rules() -> None:
    """What each kind is known for, by hand."""
    from tokenizers import models

    def pieces(pre: str, text: str) -> list[str]:
        variant = PRE_TOKENIZERS[pre]
        backend = gguf_tokenizer.byte_level_backend(["a"], [], variant, "x")
        assert isinstance(backend.model, models.BPE)
        return [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("llama-bpe", "12345 it'S") == ["123", "45", " it", "'S"]
    assert pieces("qwen2", "123 it'S") == ["1", "2", "3", " it", "'S"]
    assert pieces("gpt-2", "123 it's") == ["123", " it", "'s"]
    assert pieces("smollm", "a  12") == ["a", "  ", "1", "2"]
    assert pieces("tekken", "helloWorld 12") == ["hello", "World", " ", "1", "2"]
    assert pieces("deepseek-v3", "1234漢字x!y") == ["123", "4", "漢字", "x", "!y"]
    assert all(PRE_TOKENIZERS[name].splits for name in PRE_TOKENIZERS)


def test_ignore_merges(tmp_path: Path) -> None:
    values = gpt2_values() | {"pre": "llama-bpe"}
    values["tokens"] = [*values["tokens"], "zqzq"]  # a whole word that no merge makes
    values["token_type"] = [*values["token_type"], NORMAL]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **values))
    assert tokenizer.encode("zqzq", add_special_tokens=False) == [len(values["tokens"]) - 1]
    assert tokenizer.encode("zqzq")[0] == tokenizer.bos_token_id  # these models add BOS unless told otherwise


def test_eot_counts_as_an_end(tmp_path: Path) -> None:
    values = gpt2_values()
    by_name = load_tokenizer(write_gguf(tmp_path / "a.gguf", **values))
    assert by_name.eos_token_ids == (1, by_name.token_to_id("<|eot_id|>"))
    declared = load_tokenizer(write_gguf(tmp_path / "b.gguf", **values, eot_token_id=7))
    assert declared.eos_token_ids == (1, 7)


def test_added_tokens_of_gguf(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **gpt2_values(), add_bos_token=True, add_eos_token=True))
    think = tokenizer.token_to_id("<think>")
    assert tokenizer.encode("<think>") == [0, think, 1]
    assert tokenizer.decode([0, think, 1]) == "<think>"
    assert think in tokenizer.added_token_ids and think not in tokenizer.special_token_ids


def test_qwen_files_without_a_pre_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **gpt2_values(), architecture="qwen2"))
    assert len(tokenizer.encode("e\u0301")) == len(tokenizer.encode("é"))


def test_chat_templates_of_gguf(tmp_path: Path) -> None:
    values = gpt2_values() | {"chat_template": "d", "chat_template.tool_use": "t"}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **values))
    assert tokenizer.chat_template == "d" and tokenizer.chat_templates == {"default": "d", "tool_use": "t"}


def spm_values(seed: int) -> dict:
    tokens, types, scores = sentencepiece_vocab(random.Random(seed))
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def sentencepiece_encode(text: str, tokens: list[str], types: list[int], scores: list[float], prefix: bool) -> list[int]:
    """SentencePiece's BPE, slowly: join the neighbours whose whole scores best, leftmost first; bytes for the rest."""
    vocab = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER)}
    parts = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while True:
        best = None
        for i in range(len(parts) - 1):
            whole = vocab.get(parts[i] + parts[i + 1])
            if whole is not None and types[whole] == NORMAL and (best is None or scores[whole] > best[0]):
                best = (scores[whole], i)
        if best is None:
            break
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    return [i for part in parts for i in ([vocab[part]] if part in vocab else [3 + byte for byte in part.encode()])]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gguf_against_the_algorithm(prefix: bool, tmp_path: Path) -> None:
    rng = random.Random(9)
    for seed in range(3):
        values = spm_values(seed)
        tokenizer = load_tokenizer(write_gguf(tmp_path / f"{seed}.gguf", **values, add_space_prefix=prefix, add_bos_token=False))
        for _ in range(300):
            text = random_text(rng) if rng.random() < 0.4 else "".join(rng.choices("abcde KLM   01.", k=rng.randint(0, 30)))
            expected = sentencepiece_encode(text, values["tokens"], values["token_type"], values["scores"], prefix)
            got = tokenizer.encode(text)
            assert got == expected, repr(text)
            assert tokenizer.decode(got) == text.replace("▁", " ")


def test_sentencepiece_gguf_equals_transformers(tmp_path: Path) -> None:
    """On text that begins with no space and holds no special tokens; transformers treats those in its newer way."""
    path = write_gguf(tmp_path / "m.gguf", **spm_values(4))
    tokenizer, truth = load_tokenizer(path), from_transformers(path)
    rng = random.Random(10)
    for _ in range(600):
        text = random_text(rng).lstrip(" ▁")
        assert tokenizer.encode(text) == truth.encode(text), repr(text)


def test_sentencepiece_gguf_puts_a_space_before_text_after_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **spm_values(5)))
    words = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("<s>ab</s>ab", add_special_tokens=False) == [1, *words, 2, *words]
    assert tokenizer.encode("ab") == [1, *words]  # BOS unless the file says otherwise
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "t5"}, "'t5'.*not supported.*gpt2.*llama"),
        ({"model": "bert"}, "'bert'"),
        ({"pre": "klingon"}, "'klingon'.*llama-bpe"),
        ({"merges": None}, "merges"),
        ({"merges": ["oneword"]}, "not two tokens"),
        ({"merges": ["zz qq"]}, "don't fit together"),
        ({"tokens": None}, "holds no tokenizer.*--tokenizer"),
        ({"token_type": [1, 2]}, "2 entries"),
    ],
)
def test_unusable_ggufs_are_refused_by_name(change: dict, says: str, tmp_path: Path) -> None:
    values = {key: value for key, value in {**gpt2_values(), **change}.items() if value is not None}
    with pytest.raises(ModelError, match=says):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", **values))


def test_spm_gguf_without_scores_or_merges(tmp_path: Path) -> None:
    values = spm_values(1)
    del values["scores"]
    with pytest.raises(ModelError, match="neither scores nor merges"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", **values))


def test_damaged_ggufs_are_refused(tmp_path: Path) -> None:
    data = Path(write_gguf(tmp_path / "m.gguf", **gpt2_values())).read_bytes()
    rng = random.Random(3)
    broken = [b"", b"GGUF", b"nope" + data[4:]] + [data[: rng.randrange(len(data) - 200)] for _ in range(20)]
    for _ in range(60):
        damaged = bytearray(data[:400])
        damaged[rng.randrange(16, 400)] ^= 1 << rng.randrange(8)
        broken.append(bytes(damaged))
    for i, content in enumerate(broken):
        file = tmp_path / f"{i}.gguf"
        file.write_bytes(content)
        with pytest.raises(ModelError):
            load_tokenizer(str(file))


def test_big_endian_files_are_refused_by_name(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack(">Q", len(value.encode())) + value.encode()

    file = tmp_path / "m.gguf"
    entry = text("tokenizer.ggml.tokens") + struct.pack(">IIQ", 9, 8, 2) + text("a") + text("é")
    file.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + entry)
    with pytest.raises(ModelError, match="big-endian"):
        read_gguf_metadata(str(file))


def test_metadata_steps_over_what_is_not_asked_for(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "m.gguf", **spm_values(2), add_bos_token=True, pre="é")
    metadata = read_gguf_metadata(path, ("",))
    fields = gguf.GGUFReader(path).fields
    assert set(metadata) == {name for name in fields if not name.startswith("GGUF.")}
    assert all(metadata[name] == fields[name].contents() for name in metadata)
    assert set(read_gguf_metadata(path, ("general.arch",))) == {"general.architecture"}
    assert set(read_gguf_metadata(smollm2_path(), ("tokenizer.ggml.eos",))) == {"tokenizer.ggml.eos_token_id"}


# -- Folders -----------------------------------------------------------------------------------------------------------


def save(folder: Path, backend, **config) -> str:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("name", ZOO)
def test_folders_equal_transformers(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, ZOO[name](), tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>")
    tokenizer, truth = load_tokenizer(path), from_transformers(path, gguf=False)
    rng = random.Random(name)
    for _ in range(400):
        text = random_text(rng, ["<s>", "</s>", "<think>"])
        ids = tokenizer.encode(text)
        assert ids == truth.encode(text), repr(text)
        if "▁" not in text and "\ufffd" not in text:
            for skip in (True, False):
                expected = truth.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip) == expected
    assert tokenizer.vocab_size == len(truth)


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False), (None, None), (None, True)])
def test_add_bos_and_eos(bos: bool | None, eos: bool | None, kind: str, tmp_path: Path) -> None:
    """tokenizer.json has the rule, as transformers holds too; a Llama configuration's explicit flags count for more."""
    backend = byte_level_bpe()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    flags = {key: value for key, value in (("add_bos_token", bos), ("add_eos_token", eos)) if value is not None}
    eos_token = {"__type": "AddedToken", "content": "</s>"}
    path = save(tmp_path, backend, tokenizer_class=kind, bos_token="<s>", eos_token=eos_token, **flags)
    ids = load_tokenizer(path).encode("x")
    if kind == "PreTrainedTokenizerFast":
        assert ids == from_transformers(path, gguf=False).encode("x")
    flagged = kind == "LlamaTokenizerFast" and (bos, eos) != (None, None)
    assert (ids[0] == 0, ids[-1] == 1) == ((bos is not False, bool(eos)) if flagged else (True, False))
    assert len(load_tokenizer(path).encode("x", add_special_tokens=False)) == 1


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(save(tmp_path, backend))
    assert len(tokenizer.encode("z")) == 1 and len(tokenizer.encode("z q" * 100)) > 100


def test_special_tokens_of_the_configuration(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    size = backend.get_vocab_size()
    path = save(
        tmp_path,
        backend,
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token={"content": "<think>"},
        extra_special_tokens=["two words"],
        added_tokens_decoder={str(size): {"content": "<new>", "special": True}, str(size + 1): {"content": "<plain>", "special": False}},
    )
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8")
    tokenizer = load_tokenizer(path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<think>"}
    ids = tokenizer.encode("<new><plain><think>two words")
    assert ids[:2] == [size, size + 1] and tokenizer.decode(ids) == "<plain>" and len(ids) == 4
    assert tokenizer.vocab_size == size + 2


def test_configuration_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level_bpe(), added_tokens_decoder={"7": {"content": "<new>", "special": True}})
    with pytest.raises(ModelError, match="'<new>' the id 7"):
        load_tokenizer(path)


def test_chat_template_files(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level_bpe(), chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
    assert load_tokenizer(path).chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "c"}', encoding="utf-8")
    assert load_tokenizer(path).chat_template == "c"
    (tmp_path / "chat_template.jinja").write_text("é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r", encoding="utf-8")
    assert load_tokenizer(path).chat_templates == {"default": "é", "tool_use": "b", "rag": "r"}
    assert load_tokenizer("/nowhere", path).chat_template == "é"
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).chat_template == "é"


def test_a_folder_with_one_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", **gpt2_values())
    assert load_tokenizer(str(tmp_path)).bos_token == "<s>"
    write_gguf(tmp_path / "n.gguf", **gpt2_values())
    with pytest.raises(ModelError, match="several GGUF files.*m.gguf, n.gguf"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "holds no tokenizer.json"),
        ({"vocab.json": "{}", "merges.txt": ""}, r"vocab.json, merges.txt alone can't be used.*save_pretrained"),
        ({"tokenizer.json": "{"}, "Cannot read"),
        ({"tokenizer.json": "{}"}, "Cannot read"),
        ({"tokenizer.model": "nonsense"}, "not a SentencePiece model"),
    ],
)
def test_unusable_folders(files: dict[str, str], says: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=says):
        load_tokenizer(str(tmp_path))


def test_a_broken_configuration(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level_bpe())
    for content, says in (("{", "not valid JSON"), ("[]", "JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ModelError, match=says):
            load_tokenizer(path)


def test_missing_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(ModelError, match="not a hub id"):
        load_tokenizer("x", str(tmp_path / "none"))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="what kind"):
        load_tokenizer(str(tmp_path / "weights.bin"))


# -- SentencePiece's own files -----------------------------------------------------------------------------------------


def protobuf(number: int, value: float | bytes) -> bytes:
    def varint(n: int) -> bytes:
        n &= (1 << 64) - 1
        out = b""
        while n > 127:
            out += bytes([n & 127 | 128])
            n >>= 7
        return out + bytes([n])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_file(values: dict, model_type: int = 2, normalizer: bytes = b"") -> bytes:
    data = b""
    for token, kind, score in zip(values["tokens"], values["token_type"], values["scores"]):
        data += protobuf(1, protobuf(1, token.encode()) + protobuf(2, float(score)) + (protobuf(3, kind) if kind != NORMAL else b""))
    data += protobuf(2, protobuf(3, model_type) + protobuf(43, -1))
    return data + protobuf(3, normalizer or protobuf(1, b"identity") + protobuf(4, 0))


def test_sentencepiece_model_equals_gguf(tmp_path: Path) -> None:
    values = spm_values(6)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(values))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "c", "add_eos_token": true}', encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    truth = load_tokenizer(write_gguf(tmp_path / "m.gguf", **values, add_eos_token=True))
    rng = random.Random(8)
    for _ in range(300):
        text = random_text(rng, ["<s>", "<think>"])
        assert tokenizer.encode(text) == truth.encode(text)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<s>", "</s>", "c")
    assert BYTE in values["token_type"] and UNKNOWN in values["token_type"]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"model_type": 1}, "type unigram"), ({"normalizer": protobuf(2, b"charsmap") + protobuf(4, 0)}, "normalizes")],
)
def test_other_sentencepiece_models_say_how_to_convert(options: dict, says: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(spm_values(6), **options))
    with pytest.raises(ModelError, match=f"{says}.*save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_added_tokens_decode_to_themselves() -> None:
    """An added "é" is matched as text, so it must come out as text, though its letter stands for a byte in the alphabet."""
    backend = byte_level_bpe()
    backend.add_tokens([AddedToken("é", normalized=False)])
    tokenizer = wrap(backend)
    ids = tokenizer.encode("é!", add_special_tokens=False)
    assert ids[0] in tokenizer.added_token_ids and tokenizer.decode(ids) == "é!"


def test_no_heavy_imports() -> None:
    import subprocess

    code = (
        "import sys, octavo.frontend.tokenizer, octavo.frontend.chat_template, octavo.frontend.detokenizer, octavo.frontend.stop\n"
        "bad = {'torch', 'transformers', 'numpy', 'gguf', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True).stderr == ""
