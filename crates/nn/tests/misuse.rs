//! A layer keeps the user's line: in the panic of a misuse, and in what is told of a failure where it is read.

use kiln_nn::*;
use kiln_tensor::{DType, Device, Error};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Mutex;

/// What the panic of `f` says, and where.
fn panic_of(f: impl FnOnce()) -> (String, String, u32) {
    static SAID: Mutex<(String, String, u32)> = Mutex::new((String::new(), String::new(), 0));
    set_hook(Box::new(|info| {
        let text = info.payload().downcast_ref::<String>().cloned().unwrap_or_default();
        let at = info.location().map(|at| (at.file().to_string(), at.line())).unwrap_or_default();
        *SAID.lock().unwrap() = (text, at.0, at.1);
    }));
    let result = catch_unwind(AssertUnwindSafe(f));
    let _ = take_hook();
    assert!(result.is_err(), "it did not panic");
    SAID.lock().unwrap().clone()
}

// One test, because the panic hook belongs to the process.
#[test]
fn every_layer_tells_a_misuse_at_the_users_line() {
    let device = Device::cpu();
    let x = Tensor::ones([2, 11], &device);
    let (linear, norm) = (Linear::new(10, 5, &device), LayerNorm::new(10, &device));
    let conv = Conv2d::new(3, 5, 3, &device);
    let (attention, table) = (Attention::new(8, 2, &device), Embedding::new(10, 4, &device));
    type Misuse<'a> = (Box<dyn Fn() -> Tensor + 'a>, &'a str);
    let cases: Vec<Misuse<'_>> = vec![
        (
            Box::new(|| linear.forward(&x)),
            "linear at crates/nn/tests/misuse.rs:LINE: input has 11 features where 10 are expected ([2, 11] for weight [5, 10])",
        ),
        (Box::new(|| norm.forward(&x)), "shape [2, 11] does not end with the normalized shape [10]"),
        (
            Box::new(|| conv.forward(&Tensor::ones([2, 28, 28, 3], &device))),
            "conv2d at crates/nn/tests/misuse.rs:LINE: input has 28 channels where 3 are expected",
        ),
        (Box::new(|| attention.forward(&x)), "attention: shape [2, 11] is not [batch, length, 8]"),
        (Box::new(|| table.forward(&x)), "embedding: an index must be an integer, not f32"),
    ];
    for (f, words) in &cases {
        let (text, file, line) = panic_of(|| drop(f()));
        let words = words.replace("LINE", &line.to_string());
        assert!(text.contains(&words) && file.ends_with("tests/misuse.rs"), "{text} at {file}");
    }
}

#[test]
fn a_failure_inside_a_layer_names_the_method_and_the_users_line() {
    let device = Device::cpu();
    let table = Embedding::new(10, 4, &device);
    let (y, line) = (table.forward(&Tensor::from_vec(vec![99i64], [1], &device)), line!());
    let error = y.to_data().unwrap_err();
    let Error::Failed { origin: Some(origin), .. } = &error else { panic!("{error:?}") };
    assert!(origin.line.file().ends_with("tests/misuse.rs") && origin.line.line() == line, "{origin}");
    let want = format!(
        "embedding at {}:{line}:{} in embedding failed: index 99 is out of range for an axis of length 10",
        file!(),
        origin.line.column()
    );
    assert_eq!(error.to_string(), want);
    // The layer's scope has ended, and so has the method's name.
    let bad = Tensor::ones([2], &device).to_dtype(DType::I64).floor_divide(0);
    let text = bad.to_data().unwrap_err().to_string();
    assert!(text.starts_with("floor_divide at ") && !text.contains(" in "), "{text}");
}
