//! A method that does not fit its operands panics at the caller's line, and says what does not fit.

use kiln_tensor::*;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Mutex;

/// What the panic of `f` says, and in which file.
fn panic_of(f: impl FnOnce()) -> (String, String) {
    static SAID: Mutex<(String, String)> = Mutex::new((String::new(), String::new()));
    set_hook(Box::new(|info| {
        let text = info.payload().downcast_ref::<String>().cloned();
        let text = text.or_else(|| info.payload().downcast_ref::<&str>().map(|s| s.to_string()));
        let file = info.location().map(|at| at.file().to_string());
        *SAID.lock().unwrap() = (text.unwrap_or_default(), file.unwrap_or_default());
    }));
    let result = catch_unwind(AssertUnwindSafe(f));
    let _ = take_hook();
    assert!(result.is_err(), "it did not panic");
    SAID.lock().unwrap().clone()
}

// One test, because the panic hook belongs to the process.
#[test]
fn misuse_is_told_at_the_callers_line() {
    let device = Device::cpu();
    let x = Tensor::ones([2, 3], &device);
    let cube = Tensor::ones([2, 3, 4], &device);
    let ints = Tensor::arange(0, 6, 1, &device);
    let (row, other) = (Tensor::ones([2], &device), Tensor::ones([3], &device));
    let (images, kernel) = (Tensor::ones([2, 28, 28, 3], &device), Tensor::ones([5, 3, 3, 3], &device));
    let elsewhere = Tensor::ones([3, 2], &Device::open("cpu:1").unwrap());
    let tracked = x.clone().requires_grad();
    type Misuse<'a> = (Box<dyn Fn() + 'a>, &'a [&'a str]);
    let cases: Vec<Misuse<'_>> = vec![
        (Box::new(|| drop(&x + &cube)), &["add", "[2, 3]", "[2, 3, 4]"]),
        (Box::new(|| drop(x.sum(2))), &["sum", "axis 2", "[2, 3]"]),
        (Box::new(|| drop(x.sum([0, -2]))), &["sum", "twice"]),
        (Box::new(|| drop(ints.mean(()))), &["mean", "i64"]),
        (Box::new(|| drop(x.reshape([4, -1]))), &["reshape", "[4, -1]", "[2, 3]"]),
        (Box::new(|| drop(x.reshape([7]))), &["reshape", "[7]", "[2, 3]"]),
        (Box::new(|| drop(x.permute([0, 0]))), &["permute", "[2, 3]"]),
        (Box::new(|| drop(x.expand([3, 3]))), &["expand", "[3, 3]", "[2, 3]"]),
        (Box::new(|| drop(x.narrow(1, 2, 2))), &["narrow", "axis 1", "[2, 3]"]),
        (Box::new(|| drop(x.index((0, 3)))), &["index", "index 3", "[2, 3]"]),
        (Box::new(|| drop(x.select(1, -4))), &["select", "index -4", "axis 1", "[2, 3]"]),
        (Box::new(|| drop(x.argmax([0, 1]))), &["argmax: axes [0, 1] of shape [2, 3]", "one axis"]),
        (Box::new(|| drop(x.layer_norm(2, None, None, 1e-5))), &["layer_norm: shape [2, 3]", "shape [2]"]),
        (Box::new(|| drop(Tensor::cat(&[&x, &cube], 0))), &["cat", "[2, 3]", "[2, 3, 4]"]),
        (Box::new(|| drop(Tensor::stack(&[&x, &cube], 0))), &["stack", "[2, 3]", "[2, 3, 4]"]),
        (Box::new(|| drop(x.pad(&[3, 0], PadMode::Reflect))), &["pad", "Reflect", "[2, 3]"]),
        (Box::new(|| drop(x.matmul(&x))), &["matmul: shapes [2, 3] and [2, 3]"]),
        (Box::new(|| drop(row.matmul(&other))), &["matmul: shapes [2] and [3] do"]),
        (Box::new(|| drop(x.matmul(&other.narrow(0, 0, 2)))), &["matmul: shapes [2, 3] and [2] do"]),
        (Box::new(|| drop(x.matmul_t(&cube))), &["matmul_t: shapes [2, 3] and [2, 3, 4] do"]),
        (Box::new(|| drop(x.linear(&cube, None))), &["linear", "[2, 3, 4]"]),
        (
            Box::new(|| drop(x.linear(&Tensor::ones([5, 4], &device), None))),
            &["linear: 3 inputs where 4 are expected", "[2, 3]", "[5, 4]"],
        ),
        (Box::new(|| drop(x.conv2d(&x, None, ConvOptions::default()))), &["conv2d", "[2, 3]"]),
        (
            Box::new(|| drop(images.conv2d(&kernel, None, ConvOptions::default()))),
            &["conv2d: 28 channels where 3 are expected", "channels come before the spatial axes"],
        ),
        (
            Box::new(|| drop(images.conv_transpose2d(&kernel, None, ConvOptions::default()))),
            &["conv_transpose2d: 28 channels where 5 are expected"],
        ),
        (
            Box::new(|| drop(cube.conv1d(&Tensor::ones([1, 3, 9], &device), None, ConvOptions::default()))),
            &["conv1d: shapes [2, 3, 4] and [1, 3, 9] do"],
        ),
        (Box::new(|| drop(x.index_select(0, &row))), &["index_select: an index must be an integer, not f32"]),
        (Box::new(|| drop(x.embedding(&row))), &["embedding: an index must be an integer, not f32"]),
        (Box::new(|| drop(x.index_add(0, &row, &x))), &["index_add: an index must be an integer, not f32"]),
        (Box::new(|| drop(Tensor::ones([0], &device).amax(()))), &["amax of an empty axis"]),
        (Box::new(|| drop(Tensor::ones([0], &device).amin_keepdim(()))), &["amin_keepdim of an empty axis"]),
        (Box::new(|| drop(x.mse_loss(&cube, Reduction::Mean))), &["mse_loss: shapes [2, 3] and [2, 3, 4]"]),
        (Box::new(|| drop(x.expand([2, 4]))), &["expand: shapes [2, 3] and [2, 4]"]),
        (
            Box::new(|| drop(x.matmul(&elsewhere))),
            &["matmul: operands on different devices, cpu:0 and cpu:1"],
        ),
        (
            Box::new(|| drop(x.cross_entropy(&row))),
            &["cross_entropy: class numbers must be integers, not f32[2]"],
        ),
        (Box::new(|| drop(x.nll_loss(&row))), &["nll_loss: class numbers must be integers, not f32"]),
        (Box::new(|| drop(x.cross_entropy(&cube))), &["cross_entropy: probabilities of shape [2, 3, 4]"]),
        (Box::new(|| drop(cube.max_pool1d(9, PoolOptions::default()))), &["max_pool", "[2, 3, 4]"]),
        (Box::new(|| drop(x.gather(0, &x))), &["gather: an index must be an integer, not f32"]),
        (Box::new(|| drop(x.topk(4, 1, true))), &["topk", "4", "[2, 3]"]),
        (Box::new(|| drop(ints.softmax(0))), &["softmax", "i64"]),
        (Box::new(|| drop(x.cross_entropy(&ints))), &["cross_entropy", "i64[6]", "f32[2,3]"]),
        (Box::new(|| drop(x.quantize(DType::F16))), &["quantize", "f16"]),
        (Box::new(|| drop(x.quantize(DType::Q8))), &["q8", "[2, 3]"]),
        (Box::new(|| drop(x.backward())), &["backward", "not tracked", "under no_grad"]),
        (Box::new(|| drop(grad(&x.sum(()), &[&tracked]))), &["grad: this tensor is not tracked"]),
        (
            Box::new(|| drop(grad(&tracked.sum(()), &[&tracked, &x]))),
            &["grad: tensor 1", "f32[2,3], is not tracked", "requires_grad"],
        ),
    ];
    for (i, (f, words)) in cases.iter().enumerate() {
        let (text, file) = panic_of(f);
        assert!(words.iter().all(|word| text.contains(word)), "case {i}: {text}");
        assert!(file.ends_with("misuse.rs"), "case {i}: {text} at {file}");
    }
}
