"""The same claims as in the interpreter, on a GPU: `pytest -m gpu tests/kernels`.

References: complex numbers and softmax in float64; the plain twins; decoding without graphs.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from caches import SCALE, cached, written_out
from rotations import answer, problem
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from narrow_models import narrow
from tiny_models import left_padded, tiny, tokens
from tolerances import assert_same_text
from trisect.decode import Decoder
from trisect.decode.prepare import FusedNorm, fuse_norm
from trisect.kernels import rotate_qk, using
from trisect.kernels.elementwise import gated, normed, plain_gated
from trisect.kernels.sdpa import sdpa
from trisect.models import layer_views
from trisect.models.attention import HeadLayout

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


KINDS = ("shared", "index", "rates")
WIDTHS = ((48, 0), (5, 3), (32, 32), (20, 0))
"""Pairs and channels behind them."""
SHAPES = ((1, 3, 3, True), (130, 8, 1, True), (17, 2, 4, False))
"""Tokens, key heads, queries to each, and whether they are views into a fused projection."""


@pytest.mark.parametrize("layout", ["half", "adjacent"])
@pytest.mark.parametrize("width", range(len(WIDTHS)))
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_the_kernel_turns_heads_as_complex_numbers_do(layout: str, width: int, shape: int) -> None:
    """Every width in every layout and shape; kinds and types take turns, each kind meeting each type."""
    (pairs, rest), (length, kv_heads, group, strided) = WIDTHS[width], SHAPES[shape]
    kind, dtype = KINDS[(shape + width) % 3], list(TOLERANCE)[(shape + 2 * width) % 3]
    made: dict[str, Any] = {"kind": kind, "layout": layout, "pairs": pairs, "rest": rest, "dtype": dtype}
    made |= {"length": length, "kv_heads": kv_heads, "group": group, "strided": strided}
    p = problem(**made, first=131_072, device="cuda")
    expected, how = answer(p), {"pairs": pairs, "layout": layout, **p.angles()}
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    turned = rotate_qk(p.q, p.k, **how)
    for x, y in zip(turned, expected, strict=True):
        torch.testing.assert_close(x.double(), y, **close)
    if not strided:
        back = torch.ops.trisect.rotate(*turned, *p.flat(), pairs, layout == "adjacent", True)
        torch.testing.assert_close(back[0].double(), p.q.double(), rtol=close["rtol"], atol=2 * close["atol"])
    with torch.no_grad():
        rotate_qk(p.q, p.k, in_place=True, **how)
    assert p.q.equal(turned[0])
    assert p.k.equal(turned[1])


def test_gradients_through_the_kernel_are_those_of_the_twin() -> None:
    p = problem(kind="rates", rest=2, pairs=24, length=33, device="cuda")
    found = []
    for choice in ("kernel", "plain"):
        q, k = p.q.clone().requires_grad_(), p.k.clone().requires_grad_()
        with using(rotary=choice):  # type: ignore[arg-type]
            turned = rotate_qk(q, k, pairs=p.pairs, layout="half", **p.angles())
        (turned[0].square().sum() + turned[1].sin().sum()).backward()
        found.append((q.grad, k.grad))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_the_operators_keep_the_rules_of_torch_on_a_gpu() -> None:
    p = problem(kind="index", device="cuda")
    arguments = (p.q.requires_grad_(), p.k.requires_grad_(), *p.flat(), p.pairs, False, False)
    torch.library.opcheck(torch.ops.trisect.rotate.default, arguments)


@pytest.mark.parametrize(
    ("group", "qk", "vo", "dtype"),
    [(1, 96, 96, torch.bfloat16), (4, 96, 80, torch.float16), (3, 48, 64, torch.bfloat16), (1, 40, 128, torch.float16)],
)
def test_attention_over_the_live_slots_equals_softmax_written_out(
    dtype: torch.dtype, group: int, qk: int, vo: int
) -> None:
    from trisect.kernels.triton_decode import Tiles, launch_attend

    q, keys, values = (x.cuda() for x in cached(2, 3, group, qk, vo, 700, dtype))
    for stop, window, splits in ((0, None, 16), (513, None, 1), (698, 100, 16), (699, None, 16)):
        start = torch.tensor([0, min(3, stop)], device="cuda")
        expected = written_out(q, keys, values, start, stop, window)
        found = launch_attend(
            q, keys, values, start, torch.tensor([stop], device="cuda"),
            scale=SCALE, window=window, tiles=Tiles(block=64, splits=splits),
        )  # fmt: skip
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize(("qk", "vo"), [(96, 96), (80, 64), (64, 80), (76, 80), (102, 102), (160, 128)])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_no_width_reaches_the_math_backend(qk: int, vo: int, group: int, masked: bool) -> None:
    for length in (1, 64):
        shapes = ((8, length, qk), (8 // group, 64, qk), (8 // group, 64, vo))
        q, k, v = (torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        mask: Tensor | None = None
        if masked:
            mask = torch.ones(length, 64, dtype=torch.bool, device="cuda").tril(64 - length)[None, None]
            mask = mask.expand(2, 1, -1, -1)
        with sdpa_kernel(FUSED):  # the math backend would raise
            found = sdpa(q, k, v, mask, scale=0.1)
        expected = sdpa(q.cpu().float(), k.cpu().float(), v.cpu().float(), None, scale=0.1)
        torch.testing.assert_close(found.cpu().float(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("qk", "vo"), [(12, 11), (16, 10), (96, 76)])
def test_heads_inside_a_fused_product_are_read_wherever_they_begin(qk: int, vo: int, dtype: torch.dtype) -> None:
    """Rows of such a product are no whole number of 16 bytes."""
    columns = torch.randn(2, 8, 3 * qk + qk + vo, device="cuda").to(dtype)
    layout = HeadLayout(heads=3, kv_heads=1, qk=qk, vo=vo)
    q, k, v = (x.transpose(1, 2) for x in layout.split([columns]))
    expected = sdpa(*(x.double() for x in (q, k, v)), None, scale=0.1)
    torch.testing.assert_close(sdpa(q, k, v, None, scale=0.1).double(), expected, rtol=2e-2, atol=2e-2)


def folded() -> Any:
    model = tiny("llama-gqa", seed=1, attention="sdpa")
    for view in layer_views(model):
        rates = torch.rand(2, 8, generator=torch.Generator().manual_seed(view.index))
        view.write(replace(view.part("qk"), rates=rates))
    return model.cuda()


def stock() -> Any:
    return tiny("llama-gqa", attention="sdpa").cuda()


@pytest.mark.parametrize(
    ("mode", "choice", "make"),
    [
        ("graphs", "plain", stock),
        ("graphs", "kernel", stock),
        ("graphs", "kernel", folded),
        ("compile", "plain", folded),
        ("compile", "kernel", stock),
    ],
)
def test_graphs_decode_what_single_calls_decode(mode: Any, choice: Any, make: Any) -> None:
    """In float32, so that no tie is broken by rounding."""
    torch._dynamo.reset()
    ids = tokens(3, 8).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with using(decode=choice, rotary=choice):
        eager = Decoder(make(), batch=3, max_length=40, mode="eager", bucket=16)
        fast = Decoder(make(), batch=3, max_length=40, mode=mode, bucket=16)
        for given in (None, mask, None):
            expected = eager.generate(ids, 30, attention_mask=given)
            assert fast.generate(ids, 30, attention_mask=given).equal(expected)


@pytest.mark.parametrize("make", [stock, folded])
@pytest.mark.parametrize("choice", ["plain", "kernel"])
def test_replayed_prompts_decode_what_single_calls_decode(choice: Any, make: Any) -> None:
    """Of the recorded length and shorter by one, after longer texts and padded ones."""
    ids = tokens(3, 18).cuda()
    with using(decode=choice, rotary=choice):
        eager = Decoder(make(), batch=3, max_length=60, mode="eager", bucket=16)
        fast = Decoder(make(), batch=3, max_length=60, mode="graphs", bucket=16)
        for prompt in (ids, ids.flip(dims=[0]), ids[:, :17], ids.roll(5, dims=1)):
            assert fast.generate(prompt, 30).equal(eager.generate(prompt, 30))
            fast.generate(ids, 3, attention_mask=left_padded(ids))
    assert fast._prompts[18] is not None


MIXTURES = ["qwen3_moe-all", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe"]


def fused(name: str) -> Any:
    """A narrow mixture with torch's fused attention, which stock gpt-oss refuses when it is made."""
    model = narrow(name)
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("mode", ["graphs", "compile"])
def test_graphs_of_mixtures_decode_what_single_calls_decode(name: str, mode: Any) -> None:
    """Each step's router chooses other experts, and the graph was recorded with those of the first."""
    torch._dynamo.reset()
    model, ids = fused(name).cuda(), tokens(3, 8).cuda()
    mask = left_padded(ids)
    eager = Decoder(copy.deepcopy(model), batch=3, max_length=40, mode="eager", bucket=16)
    fast = Decoder(model, batch=3, max_length=40, mode=mode, bucket=16)
    for given in (None, mask):
        expected = eager.generate(ids, 30, attention_mask=given)
        shown = torch.ones_like(ids) if given is None else given
        assert_same_text(eager.model, fast.generate(ids, 30, attention_mask=given), expected, shown)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_in_bf16_decode_in_graphs_at_every_batch(name: str) -> None:
    """One text gathers its experts, several go through grouped products."""
    model = fused(name).to(torch.bfloat16).cuda()
    for batch in (1, 4):
        decoder = Decoder(copy.deepcopy(model), batch=batch, max_length=32)
        assert decoder.mode == "graphs"
        first = decoder.generate(tokens(batch, 8).cuda(), 20)
        assert first.shape == (batch, 28)
        assert decoder.generate(tokens(batch, 8).cuda(), 20).equal(first)


def test_bf16_decodes_finitely_in_every_mode_and_batch() -> None:
    for batch in (1, 4):
        decoder = Decoder(tiny("llama-gqa", attention="sdpa", dtype=torch.bfloat16).cuda(), batch=batch, max_length=32)
        assert decoder.mode == "graphs"
        assert decoder.generate(tokens(batch, 8).cuda(), 20).shape == (batch, 28)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 5120), (32, 1, 4096), (8, 1, 32, 128), (7, 1037)])
def test_the_norm_kernel_computes_the_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = 3 * torch.randn(shape, device="cuda").to(dtype), torch.rand(shape[-1], device="cuda").to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    with torch.no_grad():
        torch.testing.assert_close(normed(x, weight, 1e-5).double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 11008), (2, 700, 11008), (33, 160), (7, 2 * 1037)])
def test_the_gate_kernel_computes_what_its_twin_computes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    y = 3 * torch.randn(shape, device="cuda").to(dtype)
    gate, up = y.double().chunk(2, dim=-1)
    found, twin = gated(y), plain_gated(y)
    torch.testing.assert_close(found.double(), gate / (1 + torch.exp(-gate)) * up, rtol=TOLERANCE[dtype], atol=1e-6)
    torch.testing.assert_close(found, twin, rtol=TOLERANCE[dtype], atol=1e-6)
    if dtype == torch.bfloat16:  # the same two roundings, but for the last bit of the exponential
        assert (found == twin).double().mean() > 0.99


def test_the_gate_kernel_replays_in_a_graph_on_what_is_there_by_then() -> None:
    y = torch.randn(3, 1, 1376, device="cuda", dtype=torch.bfloat16)
    gated(y)  # compiled before the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated(y)
    y.copy_(torch.randn_like(y))
    graph.replay()
    assert out.equal(gated(y))


def test_the_gate_kernel_counts_beyond_32_bits() -> None:
    rows, width = 200_000, 5504
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("takes 12 GiB")
    y = torch.empty(rows, 2 * width, device="cuda", dtype=torch.bfloat16)
    y[-5:] = torch.randn(5, 2 * width, device="cuda")
    assert gated(y)[-5:].equal(gated(y[-5:]))


class Operations(TorchDispatchMode):
    """Names of what torch runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("width", [5120, 80])
def test_a_fused_norm_is_one_operation_and_as_close_as_the_stock_one(width: int) -> None:
    stock, ours = LlamaRMSNorm(width), LlamaRMSNorm(width)
    with torch.no_grad():
        stock.weight.add_(0.3 * torch.randn(width))
    ours.load_state_dict(stock.state_dict())
    for norm in (stock, ours):
        norm.to("cuda", torch.bfloat16)
    fuse_norm(ours)
    assert isinstance(ours, FusedNorm)
    x = torch.randn(2, 9, width, device="cuda", dtype=torch.bfloat16)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + stock.variance_epsilon)
    exact = exact * stock.weight.double()
    with torch.no_grad(), Operations() as seen:
        found = ours(x)
    assert "aten._fused_rms_norm.default" in seen.names
    assert "aten.mean.dim" not in seen.names
    assert (found.double() - exact).abs().mean() <= (stock(x).double() - exact).abs().mean()
