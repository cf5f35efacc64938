"""Makes cases.jsonl and cases.safetensors beside this file: functions and losses with attributes of every kind, their values
and gradients computed by PyTorch in f64 from f32 inputs. Needs torch, numpy and safetensors: `python make.py`."""

import json
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

torch.manual_seed(7)
cases, tensors = [], {}
NAMES = {torch.float32: "f32", torch.int64: "i64", torch.bool: "bool"}


def case(op, f, inputs, attrs=None, grads=None, rel=3e-5, abs=1e-5):
    """One case: `grads` names the inputs to differentiate by, all floats if it is None."""
    attrs = attrs or {}
    number = sum(c["op"] == op for c in cases)
    name = f"{op}/{number}"
    inputs = [x if x.is_floating_point() is False else x.float() for x in inputs]
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    if grads is None:
        grads = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    for i in grads:
        wide[i].requires_grad_()
    outs = f(*wide, **attrs)
    outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
    entry = {"id": name, "op": op, "attrs": attrs, "inputs": [], "outputs": [], "grads": [], "rel": rel, "abs": abs}

    def keep(key, x):
        x = x.detach()
        x = (x.float() if x.is_floating_point() else x).contiguous().clone()
        tensors[f"{name}.{key}"] = x
        return {"tensor": f"{name}.{key}", "dtype": NAMES[x.dtype]}

    for i, x in enumerate(inputs):
        entry["inputs"].append(keep(f"in{i}", x))
    total = 0
    for i, y in enumerate(outs):
        out = keep(f"out{i}", y)
        if y.is_floating_point() and y.requires_grad and grads:
            cot = torch.rand(y.shape).float() + 0.5
            out["cotangent"] = keep(f"cot{i}", cot)["tensor"]
            finite = torch.where(torch.isfinite(y), y, torch.zeros_like(y)) if not torch.isfinite(y).all() else y
            total = total + (finite * cot.double()).sum()
        entry["outputs"].append(out)
    if grads and torch.is_tensor(total):
        gs = torch.autograd.grad(total, [wide[i] for i in grads], allow_unused=True)
        for i, g in zip(grads, gs):
            g = torch.zeros_like(wide[i]) if g is None else g
            entry["grads"].append({"input": i, "tensor": keep(f"grad{i}", g)["tensor"]})
    cases.append(entry)


R = lambda *shape: torch.randn(*shape)
U = lambda *shape: torch.rand(*shape)
I = lambda *xs: torch.tensor(xs)
inf, nan = float("inf"), float("nan")

# Elementwise, far out and at the edges.
case("erfc", torch.erfc, [torch.tensor([-6.0, -2.0, -0.5, 0.0, 0.1, 0.7, 1.0, 2.5, 4.0, 8.0])], rel=3e-6, abs=1e-30)
case("erfc", torch.erfc, [torch.tensor([inf, -inf, nan, 30.0])], grads=[])
case("erfinv", torch.erfinv, [torch.tensor([-0.999, -0.7, -0.01, 0.0, 0.3, 0.9, 0.99995])], rel=1e-4)
case("erfinv", torch.erfinv, [torch.tensor([1.0, -1.0, 1.5, nan])], grads=[])
case("exp2", torch.exp2, [torch.tensor([-3.0, 0.0, 0.5, 10.0, -inf, inf])], grads=[], rel=1e-7, abs=0)
case("log10", torch.log10, [torch.tensor([1e-20, 0.5, 1.0, 1000.0, 0.0, -1.0])], grads=[], rel=1e-6, abs=1e-7)
case("lgamma", torch.lgamma, [torch.tensor([-3.7, -0.5, 1e-3, 0.5, 1.0, 1.5, 2.0, 5.0, 30.0, 1e6])], rel=1e-5)
case("lgamma", torch.lgamma, [torch.tensor([0.0, -2.0, inf])], grads=[])
case("digamma", torch.digamma, [torch.tensor([-3.7, -0.5, 0.01, 0.5, 1.0, 1.5, 7.0, 100.0])], rel=1e-5)
case("digamma", torch.digamma, [torch.tensor([0.0, -2.0, inf])], grads=[])
case("logit", torch.logit, [torch.tensor([0.0, 0.1, 0.5, 0.99, 1.0])], {"eps": 0.05})
case("sinc", torch.sinc, [torch.tensor([0.0, 0.5, -1.25, 3.0, 1e-3, -0.02, 0.3])], abs=1e-7)
case("xlogy", torch.xlogy, [torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.0, 3.0, 0.5, 2.0])], grads=[0])
case("xlogy", torch.xlogy, [torch.tensor([0.0, 0.0, 0.0]), torch.tensor([nan, inf, -1.0])], grads=[])
case("logaddexp", torch.logaddexp, [torch.tensor([0.0, 1000.0, -inf, inf, 2.0]), torch.tensor([0.0, 1.0, -inf, inf, -inf])], grads=[])
case("logaddexp2", torch.logaddexp2, [R(3, 1), R(4)])
case("hypot", torch.hypot, [torch.tensor([3e30, 3.0, 0.0, inf]), torch.tensor([4e30, -4.0, 0.0, 1.0])], grads=[])
case("hypot", torch.hypot, [R(3, 1), R(4)])
case("lerp", lambda x, y, weight: torch.lerp(x, y, weight), [R(3, 1), R(4)], {"weight": 0.75})
case("copysign", torch.copysign, [torch.tensor([1.0, -2.0, 3.0, -4.0]), torch.tensor([-0.0, 0.0, -1.0, -inf])], grads=[0])
case("signbit", torch.signbit, [torch.tensor([0.0, -0.0, -1.0, 2.0])], grads=[])
case("heaviside", torch.heaviside, [torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([0.5, 0.5, 0.5])], grads=[])
case("fmax", torch.fmax, [torch.tensor([1.0, nan, 3.0, nan]), torch.tensor([2.0, 2.0, nan, nan])], grads=[])
case("fmin", torch.fmin, [torch.tensor([1.0, nan, 3.0, nan]), torch.tensor([2.0, 2.0, nan, nan])], grads=[])
case("nan_to_num", torch.nan_to_num, [torch.tensor([nan, inf, -inf, 1.0])], {"nan": 2.0, "posinf": 7.0, "neginf": -1.0}, grads=[0], rel=1e-6)
case("addcmul", lambda x, a, b, value: torch.addcmul(x, a, b, value=value), [R(2, 3), R(3), R(2, 1)], {"value": 0.5})
case("addcdiv", lambda x, a, b, value: torch.addcdiv(x, a, b, value=value), [R(2, 3), R(3), U(2, 1) + 1], {"value": 0.5})
case("isclose", torch.isclose, [torch.tensor([1.0, inf, nan, 1.0]), torch.tensor([1.0 + 1e-6, inf, nan, 1.1])], {"equal_nan": True}, grads=[])
case("isclose", torch.isclose, [torch.tensor([1.0, inf, nan]), torch.tensor([1.01, -inf, nan])], {"rtol": 0.1}, grads=[])

# Largest, smallest, middle.
case("max", lambda x: torch.max(x), [R(2, 3)])
case("max", torch.max, [torch.tensor([[1.0, nan, 3.0], [2.0, 2.0, 1.0]])], {"dim": -1}, grads=[])
case("min", torch.min, [R(2, 3, 4)], {"dim": 0, "keepdim": True})
case("median", lambda x: torch.median(x), [R(3, 4)])
case("median", torch.median, [R(4, 3)], {"dim": 0, "keepdim": True})
case("median", torch.median, [torch.tensor([[1.0, nan, 3.0, 0.0], [4.0, 2.0, 3.0, 1.0]])], {"dim": 1}, grads=[])
case("kthvalue", torch.kthvalue, [R(3, 5)], {"k": 2, "dim": 1, "keepdim": True})
for word in ["linear", "lower", "higher", "nearest", "midpoint"]:
    case("quantile", lambda x, q, **a: torch.quantile(x, torch.tensor(q, dtype=x.dtype), **a), [R(3, 5)], {"q": [0.1, 0.6, 1.0], "dim": 1, "interpolation": word})
case("median", torch.median, [I(5, 3, 9, 1)], {"dim": 0})
case("max", torch.max, [torch.tensor([[5, 3], [3, 9]])], {"dim": 0})
case("quantile", torch.quantile, [R(3, 4)], {"q": 0.3})
case("quantile", torch.quantile, [R(3, 4)], {"q": 0.3, "keepdim": True})
case("quantile", torch.quantile, [R(3, 4)], {"q": 0.3, "dim": 0, "keepdim": True})
case("quantile", torch.quantile, [torch.tensor([[1.0, nan], [3.0, 4.0]])], {"q": 0.5, "dim": 1}, grads=[])
case("count_nonzero", lambda x: torch.count_nonzero(x), [torch.tensor([[0.0, 1.0], [nan, 0.0]])], grads=[])
case("cummax", lambda x, dim: torch.cummax(x, dim)[0], [torch.tensor([[1.0, 1.0, 3.0, 2.0, 3.0], [2.0, 0.0, 2.0, 5.0, 1.0]])], {"dim": 1})
case("cummin", lambda x, dim: torch.cummin(x, dim)[0], [R(7, 2)], {"dim": 0})
case("cummax", lambda x, dim: torch.cummax(x, dim)[0], [torch.tensor([1.0, nan, 3.0])], {"dim": 0}, grads=[])
case("nansum", torch.nansum, [torch.tensor([[1.0, nan], [3.0, 4.0]])], {"dim": 1})
case("nanmean", torch.nanmean, [torch.tensor([[1.0, nan], [3.0, 4.0]])], {"dim": 1})
case("diff", torch.diff, [R(3, 5)], {"n": 2})

# Products.
for equation, shapes in [
    ("i,j->ij", [(3,), (4,)]), ("ij,ij->", [(3, 4), (3, 4)]), ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("...ij,...jk->...ik", [(2, 3, 4), (4, 5)]), ("i...,i...->...", [(3, 2, 4), (3, 2, 1)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
    ("ij->ji", [(2, 3)]), ("ij", [(2, 3)]), ("ba", [(2, 3)]), ("iij->j", [(3, 3, 2)]), ("ii", [(3, 3)]), ("ijk->", [(2, 3, 2)]),
    ("bi,bi->b", [(2, 3), (2, 3)]), ("ab,bc", [(2, 3), (3, 4)]), ("abc,bd->acd", [(2, 3, 4), (1, 5)]), (" i j , j -> i ", [(2, 3), (3,)]),
    ("...,...->...", [(2, 1), (3,)]), ("ijj,jk->ik", [(2, 3, 3), (3, 2)]),
]:
    case("einsum", lambda *xs, equation: torch.einsum(equation, *xs), [R(*s) for s in shapes], {"equation": equation})
case("tensordot", torch.tensordot, [R(2, 3, 4), R(4, 5)], {"dims": 1})
case("tensordot", torch.tensordot, [R(2, 3, 4), R(4, 5, 2)], {"dims": [[2, 0], [0, 2]]})
case("tensordot", torch.tensordot, [R(2), R(3)], {"dims": 0})
case("addmm", torch.addmm, [R(4), R(3, 2), R(2, 4)], {"beta": 0.0})
case("addmm", torch.addmm, [R(4), R(3, 2), R(2, 4)])
case("diag", torch.diag, [R(3)], {"diagonal": 1})
case("diag", torch.diag, [R(3)], {"diagonal": -2})
case("diag", torch.diag, [R(3, 5)], {"diagonal": 2})
case("diag", torch.diag, [R(3, 5)], {"diagonal": -1})
case("diag", torch.diag, [R(2, 2)], {"diagonal": 2})
case("diagonal", torch.diagonal, [R(2, 3, 4)], {"offset": 1, "dim1": 2, "dim2": 0})
case("diagonal", torch.diagonal, [R(2, 3, 4)], {"offset": -1, "dim1": -2, "dim2": -1})
case("diag_embed", torch.diag_embed, [R(2, 3)], {"offset": -1})
case("trace", torch.trace, [R(3, 5)])
case("normalize", F.normalize, [R(2, 3, 4)], {"p": 1.0, "dim": -1})
case("normalize", F.normalize, [torch.zeros(2, 3)], {"eps": 0.5})
for p in [0.0, 1.0, 1.5, 2.0, 3.0, inf]:
    case("cdist", torch.cdist, [R(2, 3, 4), R(2, 5, 4)], {"p": p})
case("cdist", torch.cdist, [R(30, 3), R(2, 3)], rel=1e-4)
case("cosine_similarity", F.cosine_similarity, [R(3, 1, 4), R(2, 4)], {"dim": -1})
case("cosine_similarity", F.cosine_similarity, [torch.zeros(2, 4), R(2, 4)], {"eps": 0.1})
case("pairwise_distance", F.pairwise_distance, [R(3, 4), R(4)], {"p": 1.0, "keepdim": True})

# Indices and sets.
case("index", lambda x, i, j: x[i, j], [R(4, 3, 2), I([[0], [-1]][0], [[0], [-1]][1]), I(2, -3, 0)])
case("index", lambda x, i: x[i], [R(4, 3), torch.tensor([[0, -4], [3, 0]])])
case("index_put", lambda x, i, j, v, accumulate: x.index_put((i, j), v, accumulate), [R(4, 3), I(0, -1), I(2, -3), R(2)], {"accumulate": False})
case("index_put", lambda x, i, j, v, accumulate: x.index_put((i, j), v, accumulate), [R(4, 3, 2), I(0, 0, 1), I(2, 2, -3), R(2)], {"accumulate": True})
case("index_put", lambda x, i, v, accumulate: x.index_put((i,), v, accumulate), [R(4, 3), torch.tensor([[0, 1], [3, -2]]), R(3)], {"accumulate": False})
case("take_along_dim", torch.take_along_dim, [R(1, 4), torch.tensor([[0, 3], [1, 1], [2, 0]])], {"dim": 1})
case("take_along_dim", lambda x, i: torch.take_along_dim(x, i), [R(2, 3), torch.tensor([5, 0])])
case("masked_scatter", torch.masked_scatter, [R(2, 3), torch.tensor([True, False, True]), R(7)])
case("unique", lambda x: torch.unique(x, return_inverse=True, return_counts=True), [torch.tensor([[1.5, -1.0, 1.5], [0.0, 0.0, 1.5]])], grads=[])
case("unique_consecutive", lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True), [I(1, 1, 2, 2, 2, 1, 3)])
case("bincount", lambda x, w, minlength: torch.bincount(x, w, minlength), [I(1, 3, 1, 0), U(4)], {"minlength": 6}, grads=[])
case("bincount", torch.bincount, [torch.zeros(0, dtype=torch.int64)], {"minlength": 3})
case("searchsorted", torch.searchsorted, [torch.tensor([[1.0, 3.0, 3.0, 5.0, 7.0], [0.0, 2.0, 4.0, 6.0, 8.0]]), torch.tensor([[3.0, 0.0, 9.0], [4.0, 5.0, -1.0]])], {"right": True}, grads=[])
case("searchsorted", torch.searchsorted, [I(1, 3, 5), torch.tensor([[0, 1, 2], [5, 6, 3]])], {"side": "left"})
case("bucketize", torch.bucketize, [torch.tensor([0.0, 1.0, 2.5, 9.0]), torch.tensor([1.0, 2.0, 3.0])], {"right": True}, grads=[])
case("isin", torch.isin, [torch.tensor([[1, 2], [3, 4]]), I(4, 1, 7)])
case("histc", torch.histc, [torch.tensor([0.0, 0.1, 0.5, 0.99, 1.0, -1.0, 2.0])], {"bins": 4, "min": 0.0, "max": 1.0}, grads=[])
case("unique", lambda x, dim: torch.unique(x, return_inverse=True, return_counts=True, dim=dim), [torch.tensor([[2, 1, 2, 0], [1, 3, 1, 3], [0, 0, 0, 9]])], {"dim": 1})
case("index", lambda x, i: x[i], [R(3, 2), torch.tensor([True, False, True])])
case("index", lambda x, i: x[i], [R(3, 2, 2), torch.tensor([[True, False], [False, True], [True, True]])])
case("index_put", lambda x, i, v, accumulate: x.index_put((i,), v, accumulate), [R(3, 2), torch.tensor([True, False, True]), R(2)], {"accumulate": True})

# Shapes.
case("repeat_interleave", lambda x, i, dim: torch.repeat_interleave(x, i, dim), [R(3, 2), I(2, 0, 3)], {"dim": 0})
case("repeat_interleave", lambda x, repeats: torch.repeat_interleave(x, repeats), [R(2, 2)], {"repeats": 3})
case("repeat_interleave", lambda x, repeats, dim: torch.repeat_interleave(x, torch.tensor(repeats), dim), [R(2, 3)], {"repeats": [1, 2, 0], "dim": -1})
case("meshgrid", lambda *xs, indexing: torch.meshgrid(*xs, indexing=indexing), [R(2), R(3), R(4)], {"indexing": "xy"})
case("broadcast_tensors", torch.broadcast_tensors, [R(3, 1), R(4)])
case("movedim", torch.movedim, [R(2, 3, 4)], {"source": [-1, 0], "destination": [0, 1]})
case("unflatten", lambda x, dim, sizes: torch.unflatten(x, dim, sizes), [R(2, 12)], {"dim": -1, "sizes": [2, -1, 3]})
for k in [-1, 2, 3, 4]:
    case("rot90", torch.rot90, [R(2, 3, 2)], {"k": k, "dims": [2, 1]})
case("unbind", torch.unbind, [R(2, 3)], {"dim": -1})
case("pixel_shuffle", F.pixel_shuffle, [R(9, 2, 1)], {"upscale_factor": 3})

# Windows and grids.
case("fold", F.fold, [R(2, 12, 6)], {"output_size": [5, 6], "kernel_size": [2, 3], "stride": [2, 2], "padding": [0, 1], "dilation": [2, 1]})
case("fold", F.fold, [R(8, 9)], {"output_size": 4, "kernel_size": 2})
for mode in ["bilinear", "nearest", "bicubic"]:
    for padding in ["zeros", "border", "reflection"]:
        for align in [False, True]:
            grid = (R(2, 3, 4, 2) * 0.9).clamp(-2.3, 2.3)
            case("grid_sample", F.grid_sample, [R(2, 3, 4, 5), grid], {"mode": mode, "padding_mode": padding, "align_corners": align}, rel=2e-4, abs=2e-5)
for padding in ["zeros", "border", "reflection"]:
    case("grid_sample", F.grid_sample, [R(1, 2, 3, 4, 5), R(1, 2, 2, 3, 3)], {"padding_mode": padding, "align_corners": False}, rel=2e-4, abs=2e-5)
case("grid_sample", F.grid_sample, [R(1, 2, 3, 4, 5), R(1, 2, 2, 3, 3)], {"mode": "nearest", "align_corners": True})
for align in [False, True]:
    case("affine_grid", F.affine_grid, [R(2, 2, 3)], {"size": [2, 1, 3, 4], "align_corners": align})
    case("affine_grid", F.affine_grid, [R(1, 3, 4)], {"size": [1, 1, 2, 3, 4], "align_corners": align})

# Losses.
sign = lambda *shape: (torch.randint(0, 2, shape) * 2 - 1).float()
for reduction in ["mean", "sum", "none"]:
    a = {"reduction": reduction}
    case("smooth_l1_loss", F.smooth_l1_loss, [R(3, 4), R(3, 4)], {"beta": 0.3, **a})
    case("kl_div_log_target", lambda x, y, **k: F.kl_div(x, y, log_target=True, **k), [R(3, 4), R(3, 4)], a)
    case("triplet_margin_loss", F.triplet_margin_loss, [R(3, 4), R(3, 4), R(3, 4)], {"swap": True, "margin": 2.0, "p": 3.0, "eps": 1e-3, **a})
    case("multi_margin_loss", lambda x, t, w, p, margin, reduction: F.multi_margin_loss(x, t, p, margin, w, reduction=reduction), [R(3, 4), I(0, 3, 1), U(4)], {"p": 2, "margin": 0.7, **a}, grads=[0])
    case("multilabel_margin_loss", F.multilabel_margin_loss, [R(3, 4), torch.tensor([[3, 0, -1, 1], [-1, 0, 0, 0], [0, 1, 2, 3]])], a)
    case("multilabel_soft_margin_loss", lambda x, t, w, **k: F.multilabel_soft_margin_loss(x, t, w, **k), [R(3, 4), torch.randint(0, 2, (3, 4)).float(), U(4)], a, grads=[0])
    case("poisson_nll_loss", F.poisson_nll_loss, [U(3, 4) + 0.1, torch.randint(0, 6, (3, 4)).float()], {"log_input": False, "full": True, "eps": 1e-3, **a}, grads=[0])
    case("gaussian_nll_loss", lambda x, t, v, **k: F.gaussian_nll_loss(x, t, v, **k), [R(3, 4), R(3, 4), U(3)], {"full": True, "eps": 0.3, **a})
    case("binary_cross_entropy", lambda x, t, w, **k: F.binary_cross_entropy(x, t, w, **k), [U(3, 4), U(3, 4), U(4)], a, grads=[0, 1])
    ctc = lambda x, t, i, n, **k: F.ctc_loss(F.log_softmax(x, -1), t, i, n, **k)
    case("ctc_loss", ctc, [R(9, 3, 5), torch.tensor([[1, 1, 3, 0], [4, 0, 0, 0], [2, 3, 4, 1]]), I(9, 5, 8), I(3, 1, 4)], a)
    case("ctc_loss", ctc, [R(7, 2, 4), I(0, 1, 1, 2), I(7, 6), I(3, 1)], {"blank": 3, **a})
    case("ctc_loss", ctc, [R(3, 2, 4), torch.tensor([[1, 1, 2], [1, 0, 0]]), I(3, 3), I(3, 0)], {"zero_infinity": True, **a})
case("ctc_loss", ctc, [R(4, 3), I(1, 2), torch.tensor(4), torch.tensor(2)], {"reduction": "none"})
case("cosine_embedding_loss", F.cosine_embedding_loss, [R(4), R(4), torch.tensor(-1.0)], grads=[0, 1])
case("binary_cross_entropy", F.binary_cross_entropy, [torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])], {"reduction": "none"}, grads=[0])
case("multi_margin_loss", F.multi_margin_loss, [R(4), torch.tensor(2)])
case("hinge_embedding_loss", F.hinge_embedding_loss, [R(3, 4), sign(3, 4)], {"margin": 0.5}, grads=[0])

here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "cases.jsonl"), "w") as file:
    for entry in cases:
        file.write(json.dumps(entry) + "\n")
save_file(tensors, os.path.join(here, "cases.safetensors"))
print(len(cases), "cases")
