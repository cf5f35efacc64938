#!/usr/bin/env python3
"""Golden cases of layers, made with PyTorch in float64: writes cases.jsonl and cases.safetensors beside itself.

    python make.py        (needs torch and safetensors)
"""
import json, pathlib
import torch, torch.nn as nn, torch.nn.functional as F
from safetensors.torch import save_file

torch.manual_seed(7)
here = pathlib.Path(__file__).parent
tensors, lines, counts = {}, [], {}


def name(t):
    return {torch.float32: "f32", torch.bool: "bool", torch.int64: "i64"}[t.dtype]


def case(op, f, inputs, grads=None, rel=1e-5, abs=1e-4, **attrs):
    """`f` of the inputs in float64; all float inputs are differentiated unless `grads` lists some."""
    number = counts[op] = counts.get(op, -1) + 1
    id = f"{op}/{number}"
    put = lambda kind, t: tensors.__setitem__(f"{id}.{kind}", t.detach().contiguous().clone()) or f"{id}.{kind}"
    inputs = [x.detach().float() if x.is_floating_point() else x for x in inputs]
    differs = lambda i: inputs[i].is_floating_point() and (grads is None or i in grads)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    wide = [x.requires_grad_() if differs(i) else x for i, x in enumerate(wide)]
    outs = f(*wide)
    outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
    case = {"id": id, "op": op, "attrs": attrs, "inputs": [], "outputs": [], "grads": [], "rel": rel, "abs": abs}
    for i, x in enumerate(inputs):
        case["inputs"].append({"tensor": put(f"in{i}", x), "dtype": name(x)})
    total = 0
    for i, y in enumerate(outs):
        out = y.float() if y.is_floating_point() else y
        entry = {"tensor": put(f"out{i}", out), "dtype": name(out)}
        if y.requires_grad:
            cotangent = torch.randn_like(y).float()
            total = total + (y * cotangent.double()).sum()
            entry["cotangent"] = put(f"cot{i}", cotangent)
        case["outputs"].append(entry)
    if torch.is_tensor(total):
        total.backward()
        for i, x in enumerate(wide):
            if differs(i):
                g = x.grad if x.grad is not None else torch.zeros_like(x)
                case["grads"].append({"input": i, "tensor": put(f"grad{i}", g.float())})
    lines.append(json.dumps(case))


def call(module, *args, parameters, **kw):
    """The module's result with these parameters, in its own order."""
    names = [n for n, _ in module.named_parameters()]
    return torch.func.functional_call(module, dict(zip(names, parameters)), args, kw)


def parameters(module):
    return [p.detach() for p in module.parameters()]


r = torch.randn

# Activations.
case("rrelu", lambda x: F.rrelu(x, 0.1, 0.3), [r(3, 4)], lower=0.1, upper=0.3)
case("softsign", F.softsign, [r(3, 4)])
case("softmin", lambda x: F.softmin(x, 0), [r(3, 4)], dim=0)
case("prelu", F.prelu, [r(2, 3, 4), r(1)])
case("hardtanh", lambda x: F.hardtanh(x, -0.5, 2.0), [r(3, 4) * 2], min_val=-0.5, max_val=2.0)

# Pools.
case("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 3), [r(2, 3, 8)], output_size=3)
case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True), [r(2, 2, 7, 5)], output_size=[3, 4], return_indices=True)
case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (None, 2)), [r(2, 5, 6)], output_size=[None, 2])
case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)), [r(1, 2, 5, 6, 3)], output_size=[2, 3, 2])
case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), [r(1, 2, 5, 6, 3)], output_size=[2, 3, 2])
case("lp_pool1d", lambda x: F.lp_pool1d(x, 2.0, 3, 2), [r(2, 3, 9)], norm_type=2.0, kernel_size=3, stride=2)
case("lp_pool2d", lambda x: F.lp_pool2d(x, 3.0, (2, 3)), [r(2, 3, 6, 6).abs()], norm_type=3.0, kernel_size=[2, 3])
case("lp_pool2d", lambda x: F.lp_pool2d(x, 2.0, 3, 2, True), [r(2, 3, 6, 6)], norm_type=2.0, kernel_size=3, stride=2, ceil_mode=True)
x = r(2, 3, 8)
y, i = F.max_pool1d(x, 2, return_indices=True)
case("max_unpool1d", lambda y, i: F.max_unpool1d(y, i, 2), [y, i], kernel_size=2)
x = r(2, 3, 7, 6)
y, i = F.max_pool2d(x, 3, 2, 1, return_indices=True)
case("max_unpool2d", lambda y, i: F.max_unpool2d(y, i, 3, 2, 1, output_size=(7, 6)), [y, i], kernel_size=3, stride=2, padding=1, output_size=[7, 6])
x = r(1, 2, 4, 4, 6)
y, i = F.max_pool3d(x, 2, return_indices=True)
case("max_unpool3d", lambda y, i: F.max_unpool3d(y, i, 2), [y, i], kernel_size=2)

# Normalisation.
case("batch_norm_eval", lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, eps=1e-3), [r(4, 3), r(3), r(3), r(3), r(3).abs() + 0.5], grads=[0, 1, 2], eps=1e-3)
case("batch_norm_eval", lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), [r(2, 3, 4, 5), r(3), r(3), r(3), r(3).abs() + 0.5], grads=[0, 1, 2])
case("instance_norm", lambda x: F.instance_norm(x, eps=1e-4), [r(2, 3, 7)], rel=1e-4, abs=2e-4, eps=1e-4)
case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [r(2, 2, 2, 3, 4), r(2), r(2)], rel=1e-4, abs=2e-4)
case("local_response_norm", lambda x: F.local_response_norm(x, 4, 1e-2, 0.5, 2.0), [r(2, 6, 4)], size=4, alpha=1e-2, beta=0.5, k=2.0)
case("local_response_norm", lambda x: F.local_response_norm(x, 5), [r(2, 7, 3, 3)], size=5)

# Recurrent layers.
def recurrent(op, kind, layers, both, bias=True, batch_first=True, **kw):
    torch.manual_seed(len(lines))
    module = kind(3, 4, layers, bias=bias, batch_first=batch_first, bidirectional=both, **kw).double()
    attrs = dict(num_layers=layers, bidirectional=both)
    if not bias:
        attrs["bias"] = False
    if not batch_first:
        attrs["batch_first"] = False
    attrs.update(kw)

    def f(x, *p):
        y, h = call(module, x, parameters=p)
        return (y, *h) if isinstance(h, tuple) else (y, h)

    x = r(2, 5, 3) if batch_first else r(5, 2, 3)
    case(op, f, [x, *parameters(module)], abs=2e-4, **attrs)

    # From states, with lengths.
    if batch_first and bias:
        lengths = [5, 2, 4]
        own = layers * (2 if both else 1)
        states = [r(own, 3, 4) for _ in range(2 if op == "lstm" else 1)]

        def f(x, *rest):
            first, p = rest[: len(states)], rest[len(states):]
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
            y, h = call(module, packed, tuple(first) if op == "lstm" else first[0], parameters=p)
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
            return (y, *h) if isinstance(h, tuple) else (y, h)

        case(op, f, [r(3, 5, 3), *states, *parameters(module)], abs=2e-4, lengths=lengths, states=len(states), **attrs)


for op, kind in (("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn", nn.RNN)):
    recurrent(op, kind, 1, False)
    recurrent(op, kind, 2, True)
    recurrent(op, kind, 2, False, bias=False, batch_first=False)
recurrent("rnn", nn.RNN, 1, True, nonlinearity="relu")


# Attention.
def attention(width=8, heads=2, queries=5, keys=5, **attrs):
    w = [r(3 * width, width) * 0.3, r(3 * width) * 0.1, r(width, width) * 0.3, r(width) * 0.1]
    return [r(2, queries, width), r(2, keys, width), *w]


def multi_head(x, y, iw, ib, ow, ob, heads, mask=None, weights=False, average=True):
    t = lambda z: z.transpose(0, 1)
    out, w = F.multi_head_attention_forward(
        t(x), t(y), t(y), x.shape[-1], heads, iw, ib, None, None, False, 0.0, ow, ob, training=False,
        attn_mask=mask, need_weights=weights, average_attn_weights=average)
    return (t(out), w) if weights else t(out)


case("multi_head_attention", lambda *a: multi_head(*a, 4), attention(queries=3, keys=6), abs=2e-4, num_heads=4)
mask = torch.rand(3, 6) < 0.4
mask[:, 0] = False
case("multi_head_attention", lambda *a: multi_head(*a[:6], 2, mask), [*attention(queries=3, keys=6), mask], abs=2e-4, num_heads=2)
case("multi_head_attention", lambda *a: multi_head(*a[:6], 2, a[6]), [*attention(), r(4, 5, 5)], abs=2e-4, num_heads=2)
case("multi_head_attention", lambda *a: multi_head(*a, 2, weights=True), attention(), abs=2e-4, num_heads=2, need_weights=True)
case("multi_head_attention", lambda *a: multi_head(*a, 2, weights=True, average=False), attention(), abs=2e-4, num_heads=2, need_weights=True, average_attn_weights=False)


# The transformer.
def transformer(op, kind, memory, causal=False, padded=False, **kw):
    torch.manual_seed(len(lines))
    module = kind(8, 2, 12, dropout=0.0, batch_first=True, **kw).double()
    given = [r(2, 5, 8)] + ([r(2, 4, 8)] if memory else [])
    masks = {}
    if causal:
        masks["tgt_mask" if memory else "src_mask"] = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    if padded:
        masks["tgt_key_padding_mask" if memory else "src_key_padding_mask"] = torch.arange(5) >= torch.tensor([[5], [3]])
    f = lambda *a: call(module, *a[: len(given)], parameters=a[len(given):], **masks)
    small = [p * 0.5 if p.dim() > 1 else p for p in parameters(module)]
    attrs = dict(nhead=2, dim_feedforward=12, **kw)
    if causal:
        attrs["causal"] = True
    if padded:
        attrs["lengths"] = [5, 3]
    case(op, f, [*given, *small], abs=3e-4, **attrs)


for norm_first in (False, True):
    transformer("transformer_encoder_layer", nn.TransformerEncoderLayer, False, norm_first=norm_first)
    transformer("transformer_decoder_layer", nn.TransformerDecoderLayer, True, causal=True, norm_first=norm_first)
transformer("transformer_encoder_layer", nn.TransformerEncoderLayer, False, causal=True, padded=True, activation="gelu")
transformer("transformer_decoder_layer", nn.TransformerDecoderLayer, True, padded=True, layer_norm_eps=1e-3)

save_file(tensors, here / "cases.safetensors")
(here / "cases.jsonl").write_text("\n".join(lines) + "\n")
print(len(lines), "cases")
