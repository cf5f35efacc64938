//! An operation of one's own: registered once, it is recorded, differentiated and executed like any other.
//!
//!     cargo run --example custom_op

use kiln::ir::custom::{CustomOp, register};
use kiln::ir::{CustomCall, Meta, Op, OpError, V};
use kiln::prelude::*;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// x³ of f32 tensors.
struct Cube;

impl CustomOp for Cube {
    fn name(&self) -> &str {
        "demo.cube"
    }

    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        match ins {
            [x] if x.dtype == DType::F32 => Ok(smallvec![*x]),
            _ => Err(OpError::Custom { op: "demo.cube".into(), message: "it takes one f32 tensor".into() }),
        }
    }

    fn eval(&self, _: &[u8], ins: &[(Meta, &[u8])], outs: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        for (x, y) in ins[0].1.chunks_exact(4).zip(outs[0].1.chunks_exact_mut(4)) {
            let x = f32::from_le_bytes([x[0], x[1], x[2], x[3]]);
            y.copy_from_slice(&(x * x * x).to_le_bytes());
        }
        Ok(())
    }

    fn grad<'a>(
        &self,
        _: &[u8],
        grads: &[Option<V<'a>>],
        ins: &[V<'a>],
        _: &[V<'a>],
        _: usize,
    ) -> Option<V<'a>> {
        Some(grads[0]? * 3.0 * ins[0].square())
    }
}

fn cube(x: &Tensor) -> Tensor {
    let call = CustomCall { name: "demo.cube".into(), attrs: Vec::new() };
    Tensor::apply(Op::Custom(Arc::new(call)), &[x]).swap_remove(0)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    register(Cube)?;
    let x = Tensor::from_vec(vec![1.0f32, -2.0, 0.5], [3], &Device::default()).requires_grad();
    let y = cube(&x);
    println!("{y}");
    assert_eq!(y.to_vec::<f32>()?, [1.0, -8.0, 0.125]);

    let first = grad(&y.sum(()), &[&x]).remove(0);
    assert_eq!(first.to_vec::<f32>()?, [3.0, 12.0, 0.75]);
    let second = grad(&first.sum(()), &[&x]).remove(0);
    assert_eq!(second.to_vec::<f32>()?, [6.0, -12.0, 3.0]);
    println!("first derivative {first}, second {second}");
    Ok(())
}
