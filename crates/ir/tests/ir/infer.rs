//! Inference on anything.

use crate::any::{application, extent, meta, metas, op, program};
use kiln_ir::*;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn never_panics((op, ins) in prop_oneof![(op(), metas()), application()]) {
        match infer(&op, &ins) {
            Ok(outs) => {
                prop_assert_eq!(outs.len(), op.outputs());
                if ins.iter().all(|meta| meta.check().is_ok()) {
                    for out in &outs {
                        prop_assert!(out.check().is_ok(), "{} gives {}", op, out);
                    }
                }
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn never_panics_on_one_operand_repeated(op in op(), x in meta()) {
        for n in 0..=4 {
            let _ = infer(&op, &[x; 4][..n]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn of_whole_streams_never_panics(program in program()) {
        let _ = verify(program);
    }

    #[test]
    fn of_max_pool_has_a_real_element_in_every_window(
        length in 0usize..6, kernel in 1u32..4, stride in 1u32..4, low in 0u32..4, high in 0u32..4, dilation in 1u32..5,
    ) {
        let pool = Pool {
            kernel: [kernel, 1, 1], stride: [stride, 1, 1], low: [low, 0, 0], high: [high, 0, 0],
            dilation: [dilation, 1, 1], extent: [0; 3],
        };
        let Ok(outs) = infer(&Op::Pool { kind: PoolKind::Max, pool }, &[Meta::new(DType::F32, [1, 1, length])]) else {
            return Ok(());
        };
        for window in 0..outs[0].shape[2] as i64 {
            let tap = |k: u32| window * stride as i64 + (k * dilation) as i64 - low as i64;
            prop_assert!((0..kernel).any(|k| (0..length as i64).contains(&tap(k))), "window {}", window);
        }
    }

    #[test]
    fn of_reshape_survives_shapes_that_cannot_be_addressed(a in extent(), b in extent(), c in extent()) {
        let wild = Meta::new(DType::F32, [a, b, c]);
        let got = infer(&Op::Move(Move::Reshape(Shape::from([c, b, a]))), &[wild]);
        prop_assert_eq!(got.is_ok(), wild.check().is_ok());
    }
}

#[test]
fn max_pool_of_an_empty_axis_is_refused() {
    let pool = Pool {
        kernel: [2, 1, 1],
        stride: [1; 3],
        low: [1, 0, 0],
        high: [1, 0, 0],
        dilation: [1; 3],
        extent: [0; 3],
    };
    let error =
        infer(&Op::Pool { kind: PoolKind::Max, pool }, &[Meta::new(DType::F32, [1, 1, 0])]).unwrap_err();
    assert!(matches!(error, OpError::Shape { .. }), "{error}");
}

#[test]
fn dilation_without_padding_needs_no_length() {
    let pool = Pool {
        kernel: [1; 3],
        stride: [1; 3],
        low: [0; 3],
        high: [0; 3],
        dilation: [3, 1, 1],
        extent: [0; 3],
    };
    assert!(infer(&Op::Pool { kind: PoolKind::Max, pool }, &[Meta::new(DType::F32, [1, 1, 2])]).is_ok());
}
