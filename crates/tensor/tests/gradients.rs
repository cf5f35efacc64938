//! Derivatives of composed methods against central differences in f64, and second derivatives against differences of
//! the first. The operations themselves are walked by the conformance suite; here is what is made of several.

use kiln_tensor::*;

type Function<'a> = &'a dyn Fn(&[Tensor]) -> Tensor;

/// Numbers in -2..2, all different and none near 0, in no order.
fn numbers(shape: &[usize], seed: usize) -> Vec<f64> {
    let at = |i: usize| ((i * 37 + seed * 53 + 11) % 101) as f64 / 101.0;
    (0..shape.iter().product()).map(|i| (at(i) - 0.497) * 4.0 + 0.003 * seed as f64).collect()
}

/// A fixed weight for each element of a result, so that every element's derivative matters.
fn weighted(y: &Tensor, seed: usize) -> Tensor {
    let weights = Tensor::from_vec(numbers(&y.shape(), seed), y.shape(), &y.device());
    (y * weights).sum(())
}

fn leaves(values: &[Vec<f64>], shapes: &[&[usize]], device: &Device) -> Vec<Tensor> {
    let leaf =
        |(values, shape): (&Vec<f64>, &&[usize])| Tensor::from_slice(values, *shape, device).requires_grad();
    values.iter().zip(shapes).map(leaf).collect()
}

/// Compares the derivative of the scalar `f` with differences, at `values`.
fn compare(name: &str, values: &[Vec<f64>], shapes: &[&[usize]], f: Function<'_>, device: &Device) {
    let xs = leaves(values, shapes, device);
    let gradients = f(&xs).backward();
    const STEP: f64 = 1e-5;
    for (k, x) in xs.iter().enumerate() {
        let got: Vec<f64> = gradients.get_or_zeros(x).to_vec().unwrap();
        for (i, got) in got.into_iter().enumerate() {
            let moved = |by: f64| -> f64 {
                let mut values = values.to_vec();
                values[k][i] += by;
                f(&leaves(&values, shapes, device)).item().unwrap()
            };
            let want = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let near = (got - want).abs() <= 2e-6 * (1.0 + want.abs());
            assert!(
                near,
                "{name} on {device}: gradient of element {i} of input {k}: {got}, differences give {want}"
            );
        }
    }
}

fn check_at(name: &str, values: &[Vec<f64>], shapes: &[&[usize]], f: Function<'_>) {
    for device in [Device::cpu(), Device::reference()] {
        compare(name, values, shapes, &|xs| weighted(&f(xs), 7), &device);
    }
}

fn check(name: &str, shapes: &[&[usize]], f: Function<'_>) {
    let values: Vec<Vec<f64>> = shapes.iter().enumerate().map(|(k, shape)| numbers(shape, k + 1)).collect();
    check_at(name, &values, shapes, f);
}

/// Compares second derivatives with differences of the first.
fn check_twice(name: &str, shapes: &[&[usize]], f: Function<'_>) {
    let values: Vec<Vec<f64>> = shapes.iter().enumerate().map(|(k, shape)| numbers(shape, k + 1)).collect();
    let first = |xs: &[Tensor]| {
        let y = weighted(&f(xs), 7);
        let gradients = grad(&y, &xs.iter().collect::<Vec<_>>());
        let parts: Vec<Tensor> = gradients.iter().enumerate().map(|(k, g)| weighted(g, k + 11)).collect();
        Tensor::stack(&parts, 0).sum(())
    };
    compare(name, &values, shapes, &first, &Device::cpu());
}

fn ids(items: &[i64], shape: &[usize], like: &Tensor) -> Tensor {
    Tensor::from_slice(items, shape, &like.device())
}

#[test]
fn activations() {
    check("clamp", &[&[3, 4]], &|x| x[0].clamp(Some(-0.7), Some(1.1)));
    check("clamp below", &[&[5]], &|x| x[0].clamp(Some(0.2), None));
    check("leaky_relu", &[&[3, 4]], &|x| x[0].leaky_relu(0.1));
    check("elu", &[&[3, 4]], &|x| x[0].elu(1.3));
    check("softplus", &[&[3, 4]], &|x| x[0].softplus_with(2.0, 1.5));
    check("where_", &[&[3, 4], &[4], &[3, 1]], &|x| x[0].gt(0.0).where_(&(&x[1] * &x[0]), &x[2].exp()));
    check("masked_fill", &[&[3, 4]], &|x| x[0].square().masked_fill(&x[0].lt(0.0), 3));
    for p in [2.0, 3.0, 1.0] {
        check("pow_scalar", &[&[4]], &|x| x[0].pow_scalar(p));
    }
    for p in [0.5, -0.5, -1.0, 1.7] {
        check("pow_scalar of positives", &[&[4]], &|x| x[0].exp().pow_scalar(p));
    }
}

#[test]
fn statistics() {
    for axes in [Axes::from(1), Axes::from([0, 2]), Axes::from(())] {
        for keep in [false, true] {
            let axes = || axes.clone();
            check("mean", &[&[2, 3, 2]], &|x| x[0].square().mean(axes()));
            check("prod", &[&[2, 3, 2]], &|x| x[0].prod(axes()));
            check("amax", &[&[2, 3, 2]], &|x| x[0].square().amax_keepdim(axes()));
            check("amin", &[&[2, 3, 2]], &|x| x[0].square().amin(axes()));
            check("var", &[&[2, 3, 2]], &|x| {
                if keep { x[0].var_keepdim(axes(), 1) } else { x[0].var(axes(), 1) }
            });
            check("std", &[&[2, 3, 2]], &|x| {
                if keep { x[0].std_keepdim(axes(), 0.5) } else { x[0].std(axes(), 0.5) }
            });
            check("logsumexp", &[&[2, 3, 2]], &|x| x[0].logsumexp(axes()));
            for p in [1.0, 2.0, 3.0, 0.5, -1.0, -2.0, f64::INFINITY, f64::NEG_INFINITY] {
                check("norm", &[&[2, 3, 2]], &|x| {
                    if keep { x[0].norm_keepdim(axes(), p) } else { x[0].norm(axes(), p) }
                });
            }
        }
    }
}

#[test]
fn scans_with_zeros() {
    let values = [vec![1.5, 0.0, -0.7, 2.0, 0.0, 0.3, 0.0, 1.1]];
    check_at("cumprod with zeros", &values, &[&[2, 4]], &|x| x[0].cumprod(1));
    check_at("cumprod across", &values, &[&[2, 4]], &|x| x[0].cumprod(0));
    check_at("prod with zeros", &values, &[&[2, 4]], &|x| x[0].prod(1));
    check("cumsum", &[&[2, 3]], &|x| x[0].square().cumsum(1));
}

#[test]
fn shapes() {
    check("expand", &[&[3, 1]], &|x| x[0].expand([2, -1, 4]).square());
    check("transpose and flatten", &[&[2, 3, 2]], &|x| x[0].transpose(0, -1).flatten(1, 2).square());
    check("slice", &[&[7, 2]], &|x| x[0].slice(0, 1, -1, 2).square());
    check("slice_assign", &[&[7, 2], &[3, 2]], &|x| x[0].slice_assign(0, 1, 6, 2, &x[1]).square());
    check("index", &[&[3, 4, 2]], &|x| x[0].index((1.., step_by(.., 2), -1)).square());
    check("cat", &[&[2, 3], &[2, 1]], &|x| Tensor::cat(&[&x[0], &x[1], &x[0]], 1).square());
    check("stack", &[&[2], &[2]], &|x| Tensor::stack(x, 1).square());
    check("split", &[&[5]], &|x| {
        let parts = x[0].split(2, 0);
        &parts[0] * &parts[1] + &parts[2]
    });
    check("repeat", &[&[2, 3]], &|x| x[0].repeat([2, 1, 3]).square());
    check("roll", &[&[3, 4]], &|x| x[0].roll(&[1, -2], &[0, 1]).square());
    check("flip", &[&[3, 4]], &|x| x[0].flip([0, 1]).square());
    check("tril", &[&[3, 4]], &|x| x[0].tril(1).square());
    check("triu", &[&[2, 3, 3]], &|x| x[0].triu(0).square());
    for mode in [PadMode::Constant(0.5), PadMode::Reflect, PadMode::Replicate, PadMode::Circular] {
        check("pad", &[&[2, 4, 5]], &|x| x[0].pad(&[2, 3, 1, 0], mode).square());
        check("pad and cut", &[&[2, 4, 5]], &|x| x[0].pad(&[-1, 2, 1, -1], mode).square());
    }
}

#[test]
fn indices() {
    check("gather", &[&[3, 4]], &|x| x[0].gather(1, &ids(&[0, 3, 3, 1, 2, 2], &[3, 2], &x[0])).square());
    check("scatter", &[&[3, 4], &[2, 2]], &|x| {
        x[0].scatter(1, &ids(&[0, 3, 2, 1], &[2, 2], &x[0]), &x[1]).square()
    });
    check("scatter_add", &[&[3, 4], &[2, 3]], &|x| {
        x[0].scatter_add(0, &ids(&[0, 0, 2, 1, 0, 2], &[2, 3], &x[0]), &x[1]).square()
    });
    check("index_select", &[&[3, 4]], &|x| x[0].index_select(1, &ids(&[3, 0, 3], &[3], &x[0])).square());
    check("index_add", &[&[3, 4], &[2, 4]], &|x| {
        x[0].index_add(0, &ids(&[2, 2], &[2], &x[0]), &x[1]).square()
    });
    check("embedding", &[&[4, 2]], &|x| x[0].embedding(&ids(&[1, 3, 1, 0], &[2, 2], &x[0])).square());
    check("sort", &[&[3, 4]], &|x| x[0].sort(1, true).0.square());
    check("topk", &[&[3, 4]], &|x| x[0].topk(2, 0, false).0.square());
    check("masked_select", &[&[3, 4]], &|x| x[0].masked_select(&x[0].gt(0.3)).unwrap().square());
}

#[test]
fn products() {
    for (a, b) in [
        (&[4usize][..], &[4usize][..]),
        (&[4], &[4, 2]),
        (&[3, 4], &[4]),
        (&[2, 3, 4], &[4, 2]),
        (&[3, 4], &[2, 4, 2]),
        (&[2, 1, 3, 2], &[3, 2, 2]),
    ] {
        check("matmul", &[a, b], &|x| x[0].matmul(&x[1]));
    }
    check("linear", &[&[2, 3, 4], &[2, 4], &[2]], &|x| x[0].linear(&x[1], Some(&x[2])));
    check("linear of a vector", &[&[4], &[4]], &|x| x[0].linear(&x[1], None));
    check("matmul_t", &[&[2, 3, 4], &[2, 2, 4]], &|x| x[0].matmul_t(&x[1]));
}

#[test]
fn convolutions() {
    let plain = ConvOptions::default();
    check("conv1d", &[&[2, 2, 6], &[3, 2, 3], &[3]], &|x| {
        x[0].conv1d(&x[1], Some(&x[2]), plain.stride(2).padding(1))
    });
    check("conv1d same", &[&[1, 2, 6], &[2, 2, 4]], &|x| {
        x[0].conv1d(&x[1], None, plain.padding(Padding::Same))
    });
    check("conv2d", &[&[1, 2, 4, 5], &[2, 2, 3, 2], &[2]], &|x| {
        x[0].conv2d(&x[1], Some(&x[2]), plain.stride([2, 1]).padding([1, 0]).dilation([1, 2]))
    });
    check("conv2d in groups", &[&[4, 4, 3], &[4, 2, 2, 2]], &|x| x[0].conv2d(&x[1], None, plain.groups(2)));
    check("conv3d", &[&[1, 1, 3, 3, 2], &[2, 1, 2, 2, 2]], &|x| {
        x[0].conv3d(&x[1], None, plain.padding([1, 0, 0]))
    });
    check("conv_transpose1d", &[&[1, 2, 3], &[2, 1, 3], &[1]], &|x| {
        x[0].conv_transpose1d(&x[1], Some(&x[2]), plain.stride(2).padding(1).output_padding(1))
    });
    check("conv_transpose2d", &[&[1, 4, 2, 3], &[4, 1, 2, 2]], &|x| {
        x[0].conv_transpose2d(&x[1], None, plain.stride(2).dilation([1, 2]).groups(2))
    });
    check("unfold", &[&[1, 2, 4, 4]], &|x| x[0].unfold([2, 3], plain.stride([1, 2]).padding(1)).square());
}

#[test]
fn pools_and_sizes() {
    let plain = PoolOptions::default();
    check("max_pool1d", &[&[2, 7]], &|x| x[0].max_pool1d(3, plain.stride(2).padding(1)));
    check("max_pool2d", &[&[1, 2, 5, 5]], &|x| x[0].max_pool2d([2, 3], plain.stride(2).ceil_mode(true)));
    check("max_pool2d dilated", &[&[1, 1, 5, 5]], &|x| x[0].max_pool2d(2, plain.stride(1).dilation(2)));
    check("avg_pool1d", &[&[2, 7]], &|x| {
        x[0].avg_pool1d(3, plain.stride(2).padding(1).count_include_pad(false))
    });
    check("avg_pool2d", &[&[1, 2, 5, 4]], &|x| {
        x[0].avg_pool2d([3, 2], plain.stride(2).padding(1).ceil_mode(true))
    });
    check("avg_pool3d", &[&[1, 1, 3, 3, 2]], &|x| x[0].avg_pool3d(2, plain.stride(1).divisor_override(3)));
    check("adaptive_avg_pool1d", &[&[2, 7]], &|x| x[0].adaptive_avg_pool1d(3));
    check("adaptive_avg_pool2d", &[&[1, 1, 5, 4]], &|x| x[0].adaptive_avg_pool2d([3, 2]));
    for mode in [
        Interpolate::Nearest,
        Interpolate::NearestExact,
        Interpolate::Linear { align_corners: false },
        Interpolate::Linear { align_corners: true },
        Interpolate::Cubic { align_corners: false },
        Interpolate::Area,
    ] {
        check("interpolate", &[&[1, 2, 4, 3]], &|x| x[0].interpolate([6, 2], mode));
        check("interpolate_by", &[&[1, 2, 5]], &|x| x[0].interpolate_by(&[1.4], mode));
    }
}

#[test]
fn norms_and_attention() {
    check("softmax", &[&[3, 4]], &|x| x[0].softmax(1));
    check("log_softmax", &[&[3, 4]], &|x| x[0].log_softmax(0));
    check("layer_norm", &[&[2, 3, 4], &[3, 4], &[3, 4]], &|x| {
        x[0].layer_norm([3, 4], Some(&x[1]), Some(&x[2]), 1e-3)
    });
    check("layer_norm with a bias alone", &[&[2, 4], &[4]], &|x| x[0].layer_norm(4, None, Some(&x[1]), 1e-3));
    check("rms_norm", &[&[2, 4], &[4]], &|x| x[0].rms_norm(4, Some(&x[1]), 1e-3));
    check("group_norm", &[&[2, 4, 3], &[4], &[4]], &|x| x[0].group_norm(2, Some(&x[1]), Some(&x[2]), 1e-3));
    check("batch_norm", &[&[3, 2, 4], &[2], &[2]], &|x| x[0].batch_norm(Some(&x[1]), Some(&x[2]), 1e-3));
    let attention = "scaled_dot_product_attention";
    check(attention, &[&[2, 3, 2], &[2, 4, 2], &[2, 4, 3]], &|x| {
        x[0].scaled_dot_product_attention(&x[1], &x[2], None, false, None)
    });
    check(attention, &[&[4, 2], &[4, 2], &[4, 2]], &|x| {
        x[0].scaled_dot_product_attention(&x[1], &x[2], None, true, Some(0.9))
    });
    check(attention, &[&[2, 1, 2, 2], &[3, 3, 2], &[1, 3, 2], &[2, 3]], &|x| {
        x[0].scaled_dot_product_attention(&x[1], &x[2], Some(&x[3]), false, None)
    });
    check(attention, &[&[2, 2], &[3, 2], &[3, 2]], &|x| {
        // The second query sees nothing.
        let mask = Tensor::from_slice(&[true, false, true, false, false, false], [2, 3], &x[0].device());
        x[0].scaled_dot_product_attention(&x[1], &x[2], Some(&mask), false, None)
    });
}

#[test]
fn losses() {
    for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
        check("mse_loss", &[&[3, 2], &[3, 2]], &|x| x[0].mse_loss(&x[1], reduction));
        check("l1_loss", &[&[3, 2], &[3, 2]], &|x| x[0].l1_loss(&x[1], reduction));
        check("huber_loss", &[&[3, 2], &[3, 2]], &|x| x[0].huber_loss(&x[1], 0.8, reduction));
        check("binary_cross_entropy_with_logits", &[&[5], &[5]], &|x| {
            x[0].binary_cross_entropy_with_logits(&x[1].sigmoid(), reduction)
        });
        check("kl_div", &[&[3, 4], &[3, 4]], &|x| x[0].log_softmax(1).kl_div(&x[1].softmax(1), reduction));
        for label_smoothing in [0.0, 0.2] {
            check("cross_entropy", &[&[3, 4, 2], &[4]], &|x| {
                let weight = Some(x[1].square());
                let options = ClassOptions { reduction, label_smoothing, weight, ..Default::default() };
                x[0].cross_entropy_with(&ids(&[0, 3, -100, 1, 2, 2], &[3, 2], &x[0]), &options)
            });
            check("cross_entropy of probabilities", &[&[3, 4], &[3, 4]], &|x| {
                let options = ClassOptions { reduction, label_smoothing, ..Default::default() };
                x[0].cross_entropy_with(&x[1].softmax(1), &options)
            });
        }
        check("nll_loss", &[&[3, 4]], &|x| {
            let options = ClassOptions { reduction, ignore_index: 1, ..Default::default() };
            x[0].nll_loss_with(&ids(&[0, 1, 3], &[3], &x[0]), &options)
        });
    }
}

#[test]
fn second_derivatives() {
    let plain = ConvOptions::default();
    check_twice("exp * sin", &[&[4]], &|x| x[0].exp() * x[0].sin());
    check_twice("div and pow", &[&[3], &[3]], &|x| x[0].exp().pow(&x[1]) / (x[1].square() + 1.0));
    check_twice("matmul", &[&[2, 3], &[3, 2]], &|x| x[0].matmul(&x[1]).square());
    check_twice("matmul_t", &[&[2, 2, 3], &[2, 3]], &|x| x[0].matmul_t(&x[1]).square());
    check_twice("softmax", &[&[2, 3]], &|x| x[0].softmax(1));
    check_twice("log_softmax", &[&[2, 3]], &|x| x[0].log_softmax(1).square());
    check_twice("logsumexp", &[&[2, 3]], &|x| x[0].logsumexp(1));
    check_twice("conv2d", &[&[1, 2, 3, 4], &[2, 2, 2, 2]], &|x| {
        x[0].conv2d(&x[1], None, plain.padding(1)).square()
    });
    check_twice("conv_transpose1d", &[&[1, 2, 3], &[2, 1, 3]], &|x| {
        x[0].conv_transpose1d(&x[1], None, plain.stride(2).padding(1).output_padding(1)).square()
    });
    check_twice("layer_norm", &[&[2, 4], &[4], &[4]], &|x| {
        x[0].layer_norm(4, Some(&x[1]), Some(&x[2]), 1e-2).square()
    });
    check_twice("rms_norm", &[&[2, 4], &[4]], &|x| x[0].rms_norm(4, Some(&x[1]), 1e-2).square());
    check_twice("batch_norm", &[&[3, 2], &[2], &[2]], &|x| {
        x[0].batch_norm(Some(&x[1]), Some(&x[2]), 1e-2).square()
    });
    check_twice("attention", &[&[3, 2], &[3, 2], &[3, 2]], &|x| {
        x[0].scaled_dot_product_attention(&x[1], &x[2], None, true, None).square()
    });
    check_twice("cumprod", &[&[5]], &|x| x[0].cumprod(0));
    check_twice("cumsum", &[&[5]], &|x| x[0].cumsum(0).square());
    check_twice("prod", &[&[2, 3]], &|x| x[0].prod(1));
    check_twice("var", &[&[2, 3]], &|x| x[0].var(1, 1).square());
    check_twice("std", &[&[2, 3]], &|x| x[0].std(1, 1));
    check_twice("norm", &[&[2, 3]], &|x| x[0].norm(1, 2.0));
    check_twice("norm of 3", &[&[2, 3]], &|x| x[0].norm(1, 3.0));
    check_twice("max_pool2d", &[&[1, 1, 4, 4]], &|x| x[0].max_pool2d(2, PoolOptions::default()).square());
    check_twice("avg_pool2d", &[&[1, 1, 4, 4]], &|x| {
        x[0].avg_pool2d(2, PoolOptions::default().stride(1)).square()
    });
    check_twice("gather", &[&[2, 3]], &|x| x[0].gather(1, &ids(&[0, 2, 2, 1], &[2, 2], &x[0])).square());
    check_twice("scatter_add", &[&[3], &[4]], &|x| {
        x[0].scatter_add(0, &ids(&[0, 2, 2, 1], &[4], &x[0]), &x[1]).square()
    });
    check_twice("sort", &[&[5]], &|x| x[0].sort(0, false).0.square());
    check_twice("gelu", &[&[5]], &|x| x[0].gelu());
    check_twice("silu", &[&[5]], &|x| x[0].silu());
}

/// At kinks and where a formula is not defined, gradients are PyTorch's.
#[test]
fn kinks() {
    let at = |items: &[f64], f: Function<'_>| -> Vec<f64> {
        let x = Tensor::from_slice(items, [items.len()], &Device::cpu()).requires_grad();
        let y = f(std::slice::from_ref(&x)).sum(());
        let gradient = if y.is_tracked() { y.backward().get_or_zeros(&x) } else { x.detach().zeros_like() };
        gradient.to_vec().unwrap()
    };
    let nan = f64::NAN;
    assert_eq!(at(&[-1.0, 0.0, 1.0, nan], &|x| x[0].clamp(Some(-1.0), Some(1.0))), [0.0, 1.0, 0.0, 0.0]);
    assert_eq!(at(&[-1.0, 0.0, 1.0], &|x| x[0].leaky_relu(0.5)), [0.5, 0.5, 1.0]);
    assert_eq!(at(&[0.0, 1e4], &|x| x[0].elu(2.0)), [2.0, 1.0]);
    assert_eq!(at(&[1.0, nan], &|x| x[0].gt(0.0).where_(&x[0], &x[0].full_like(2))), [1.0, 0.0]);
    assert_eq!(at(&[nan, 1.0], &|x| x[0].masked_fill(&x[0].isnan(), 0)), [0.0, 1.0]);
    assert_eq!(at(&[2.0, 2.0, 2.0], &|x| x[0].std(0, 1)), [0.0; 3]);
    assert_eq!(at(&[2.0, -2.0, 1.0, 2.0], &|x| x[0].amax(0)), [0.5, 0.0, 0.0, 0.5]);
    for p in [0.0, 0.5, 1.0, 2.0, 3.0, -1.0, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(at(&[0.0, 0.0], &|x| x[0].norm(0, p)), [0.0, 0.0], "p = {p}");
    }
    assert_eq!(at(&[0.0, -2.0], &|x| x[0].norm(0, 1.0)), [0.0, -1.0]);
    assert_eq!(at(&[2.0, -2.0, 1.0], &|x| x[0].norm(0, f64::INFINITY)), [0.5, -0.5, 0.0]);
    assert_eq!(at(&[0.0, 3.0], &|x| x[0].norm(0, -1.0)), [0.0, 0.0]);
    assert_eq!(at(&[f64::NEG_INFINITY, 0.0], &|x| x[0].logsumexp(0)), [0.0, 1.0]);
}
