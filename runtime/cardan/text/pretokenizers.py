r"""How text is cut before byte pairs are merged, by the name that a GGUF file gives for it.

It knows the published names and their patterns only; it reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from cardan.errors import CheckpointError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_LINES_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_LINES_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_GPT4O = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How one family of byte-level tokenizers cuts text.

    Attributes:
        splits: patterns applied one after another; matches and what is between them stay apart.
        ignore_merges: a piece that is a token as a whole is taken without merging.
        adds_bos: texts begin with the BOS token where the file does not say.
        nfc: text is brought into Unicode's composed form first.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The library's object for these patterns, ending with the byte alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """The library's normalizer, or None."""
        return normalizers.NFC() if self.nfc else None


def _families() -> dict[str, PreTokenizer]:
    gpt2 = PreTokenizer(splits=(_GPT2,))
    llama3 = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, adds_bos=True)
    llama3_plain = PreTokenizer(splits=(_LLAMA3,))
    qwen2_plain = PreTokenizer(splits=(_QWEN2,))
    digits = PreTokenizer(splits=(r"\p{N}", _GPT2))
    gpt4o = PreTokenizer(splits=(_GPT4O,))
    table = {
        gpt2: "gpt-2 gpt2 phi-2 mpt olmo jais exaone4 a.x-4.0 mellum gigachat",
        llama3: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        llama3_plain: "dbrx smaug-bpe glm4 chatglm-bpe",
        qwen2_plain: "stablelm2 deepseek-r1-qwen megrez kormo",
        digits: "smollm starcoder refact command-r codeshell exaone minerva-7b",
        gpt4o: "gpt-4o llama4 kanana2",
        PreTokenizer(splits=(_QWEN2,), nfc=True): "qwen2",
        PreTokenizer(splits=(_QWEN35,), nfc=True): "qwen35",
        PreTokenizer(splits=(_TEKKEN,), ignore_merges=True, adds_bos=True): "tekken",
        PreTokenizer(splits=_DEEPSEEK3): "deepseek-v3",
        PreTokenizer(splits=_DEEPSEEK_CODER): "deepseek-coder",
        PreTokenizer(splits=_FALCON): "falcon",
        PreTokenizer(splits=_DEFAULT): "default",
    }
    return {name: family for family, names in table.items() for name in names.split()}


def pre_tokenizer_for(name: str | None) -> PreTokenizer:
    """The cutting rules that ``tokenizer.ggml.pre`` names; files without the key mean ``default``.

    Raises:
        CheckpointError: no rules are known under that name.
    """
    families = _families()
    family = families.get("default" if name is None else name)
    if family is None:
        raise CheckpointError(
            f"The GGUF file's tokenizer.ggml.pre is {name!r}, which is not one of {', '.join(sorted(families))}. "
            "Guessing would give other tokens than the model was trained on: "
            "pass --tokenizer FOLDER with the model's tokenizer.json."
        )
    return family
