"""What a decoder-only transformer is made of: the dataclass that every family file fills in.

It knows no family, no tensor names and no arrays.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from cardan.models.fields import ConfigFields
from cardan.models.rope import Rope, RopeReader
from cardan.types import KVKind, LayerKV
from cardan.weights.kv_scales import CONFIG_KEY


class Activation(enum.Enum):
    """The gate's activation in the feed-forward block."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


ACTIVATION_NAMES = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


class QKNorm(enum.Enum):
    """What queries and keys are normalized over, before they are rotated."""

    NONE = "none"
    HEAD = "head"
    WIDTH = "width"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNorms:
    """Checkpoint names of a layer's norms; None where the family has none there.

    Attributes:
        before_attention: norm of the attention's input.
        after_attention: norm of the attention's output, before it is added to the residual stream.
        before_mlp: norm of the feed-forward block's input.
        after_mlp: norm of its output, before it is added.
    """

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORMS = BlockNorms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORMS = BlockNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORMS = BlockNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


MOST_LAYERS = 4096
"""Far beyond any model; each layer of a config costs memory before its weights are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """The sizes that every family has.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the feed-forward block.
        layers: number of layers.
        vocab: rows of the embedding.
        q_heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        context_length: longest sequence that the model was made for.
    """

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context_length: int

    @classmethod
    def read(cls, fields: ConfigFields, head_dim: int | None = None) -> DecoderSizes:
        """Read and check the sizes; ``head_dim`` is the family's default, else hidden size over heads.

        Raises:
            ModelConfigError: a size is missing, or two contradict each other.
        """
        hidden = fields.integer("hidden_size")
        q_heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", q_heads)
        if q_heads % kv_heads:
            fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {q_heads}")
        if not fields.has("head_dim") and head_dim is None and hidden % q_heads:
            fields.refuse("hidden_size", f"a multiple of num_attention_heads = {q_heads}, or a field head_dim")
        return cls(
            hidden=hidden,
            intermediate=fields.integer("intermediate_size"),
            layers=fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
            vocab=fields.integer("vocab_size"),
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=fields.integer("head_dim", head_dim or hidden // q_heads),
            context_length=fields.integer("max_position_embeddings"),
        )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """How one layer differs from the others.

    Attributes:
        window: a query sees so many keys, its own included; None for all.
        rope_id: index into the spec's ``ropes``.
    """

    window: int | None = None
    rope_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One decoder-only transformer, completely described.

    Attributes:
        family: name of the family.
        sizes: its sizes.
        layers: one entry per layer.
        ropes: rotary embeddings by ``rope_id``.
        norms: where the norms of a layer stand.
        norm_eps: added to the mean square.
        norm_offset: added to every norm's weight at load.
        qk_norm: what queries and keys are normalized over.
        activation: of the gate.
        fused_tensors: the checkpoint has one tensor for q, k and v, and one for gate and up.
        qkv_bias: whether q, k and v have a bias.
        o_bias: whether the attention's output has one.
        mlp_bias: whether gate, up and down have one.
        attention_scale: factor on ``q @ k``.
        attention_softcap: soft cap on scores, None for none.
        logit_softcap: soft cap on logits, None for none.
        embedding_scale: factor on embedded tokens.
        scales_given_embeds: whether the factor is on tokens that are given as vectors too.
        residual_scale: factor on what a block adds to the residual stream.
        logit_scale: factor on logits.
        tied: whether the head is the embedding; None: where the checkpoint has no head of its own.
        prefixes: what the names of the tensors may begin with, the likeliest first.
        head_names: what the head's tensor may be called, the likeliest first.
        kv_scales: of keys and of values for each layer, as floats of 8 bits keep them; empty for 1 everywhere.
    """

    family: str
    sizes: DecoderSizes
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    norms: BlockNorms = PRE_NORMS
    norm_eps: float
    norm_offset: float = 0.0
    qk_norm: QKNorm = QKNorm.NONE
    activation: Activation = Activation.SILU
    fused_tensors: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    scales_given_embeds: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tied: bool | None
    prefixes: tuple[str, ...] = ("model.",)
    head_names: tuple[str, ...] = ("lm_head.weight",)
    kv_scales: tuple[tuple[float, float], ...] = ()

    def layer_kv(self, index: int) -> LayerKV:
        """What an attention backend must know of a layer."""
        layer = self.layers[index]
        k_scale, v_scale = self.kv_scales[index] if self.kv_scales else (1.0, 1.0)
        return LayerKV(
            index=index,
            kind=KVKind.FULL if layer.window is None else KVKind.SLIDING,
            q_heads=self.sizes.q_heads,
            kv_heads=self.sizes.kv_heads,
            k_dim=self.sizes.head_dim,
            v_dim=self.sizes.head_dim,
            scale=self.attention_scale,
            window=layer.window,
            softcap=self.attention_softcap,
            rope_id=layer.rope_id,
            k_scale=k_scale,
            v_scale=v_scale,
        )


def kv_scales(fields: ConfigFields, sizes: DecoderSizes) -> tuple[tuple[float, float], ...]:
    """Scales of keys and values of each layer by the config's ``cardan_kv_scales``, 1 where it has none; else nothing.

    Raises:
        ModelConfigError: those of a layer are not two numbers above 0.
    """
    group = fields.fields(CONFIG_KEY)
    if group is None:
        return ()
    found: list[tuple[float, float]] = []
    for name in map(str, range(sizes.layers)):
        k_scale, v_scale = group.numbers(name, 2) if group.has(name) else (1.0, 1.0)
        if not min(k_scale, v_scale) > 0:
            group.refuse(name, "two numbers above 0")
        found.append((k_scale, v_scale))
    return tuple(found)


def rope_reader(fields: ConfigFields, sizes: DecoderSizes) -> RopeReader:
    """A reader of the config's rotary embeddings."""
    return RopeReader(fields=fields, head_dim=sizes.head_dim, context_length=sizes.context_length)


def uniform_layers(sizes: DecoderSizes, window: int | None = None) -> tuple[LayerSpec, ...]:
    """Layers that are all alike."""
    return (LayerSpec(window),) * sizes.layers


SLIDING, FULL = "sliding_attention", "full_attention"


def alternating_layers(
    fields: ConfigFields, sizes: DecoderSizes, slides: Callable[[int], bool], local_rope_id: int = 0
) -> tuple[LayerSpec, ...]:
    """Sliding and full layers, as ``layer_types`` lists them or else as ``slides(index)`` says.

    Raises:
        ModelConfigError: ``layer_types`` is wrong, or a layer slides and there is no ``sliding_window``.
    """
    if fields.has("layer_types"):
        types = fields.texts("layer_types", sizes.layers, (SLIDING, FULL))
    else:
        types = tuple(SLIDING if slides(index) else FULL for index in range(sizes.layers))
    window = fields.integer("sliding_window") if SLIDING in types else None
    return tuple(LayerSpec(window, local_rope_id) if kind == SLIDING else LayerSpec() for kind in types)
