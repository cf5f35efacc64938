//! Custom operations that have a lowering: it is what they mean, fused and alone.

use kiln_cpu::Cpu;
use kiln_device::Error;
use kiln_ir::custom::{CustomOp, register};
use kiln_ir::{CustomCall, Meta, Op, OpError, V};
use kiln_tensor::{Device, Tensor};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Of a list of four its double, of any other its square; its own code must never run. By its attribute it gives another
/// shape (1), its operand twice (2), or has no lowering (3).
struct Odd;

impl CustomOp for Odd {
    fn name(&self) -> &str {
        "custom.odd"
    }
    fn outputs(&self) -> usize {
        2
    }
    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec![ins[0], ins[0]])
    }
    fn eval(
        &self,
        attrs: &[u8],
        ins: &[(Meta, &[u8])],
        outs: &mut [(Meta, &mut [u8])],
    ) -> Result<(), String> {
        assert_eq!(attrs, [3], "there is a lowering");
        outs.iter_mut().for_each(|(_, out)| out.copy_from_slice(ins[0].1));
        Ok(())
    }
    fn lower<'a>(&self, attrs: &[u8], ins: &[V<'a>]) -> Option<SmallVec<[V<'a>; 2]>> {
        let x = ins[0];
        match attrs {
            [1] => Some(smallvec![x.reshape([1, 4]), x]),
            [2] => Some(smallvec![x, x]),
            [3] => None,
            _ if x.shape()[0] == 4 => Some(smallvec![x + x, x]),
            _ => Some(smallvec![x * x, x]),
        }
    }
}

fn odd(attrs: &[u8], x: &Tensor) -> [Tensor; 2] {
    let call = CustomCall { name: "custom.odd".into(), attrs: attrs.to_vec() };
    let mut outs = Tensor::apply(Op::Custom(Arc::new(call)), &[x]).into_iter();
    [outs.next().unwrap(), outs.next().unwrap()]
}

#[test]
fn a_lowering_fuses_with_what_is_around_it_and_has_the_same_bits_alone() {
    register(Odd).unwrap();
    let cpu = Arc::new(Cpu::start());
    let fused = Device::wrap("custom-fused", cpu.clone()).unwrap();
    let eager = Device::wrap("custom-eager", Arc::new(Cpu::start())).unwrap();
    eager.set_eager(true);
    let program = |device: &Device, attrs: &[u8], count: usize| {
        let x = Tensor::from_vec((0..count).map(|i| i as f32 - 1.5).collect(), [count], device);
        let [y, z] = odd(attrs, &(&x * 0.3));
        let out = (&y.tanh() + &z).exp();
        drop((y, z));
        out.to_vec::<f32>()
    };
    // Two sizes of one structure, whose lowerings differ.
    for count in [4, 5, 4, 5, 7] {
        let want = program(&Device::reference(), &[], count).unwrap();
        assert_eq!(program(&fused, &[], count).unwrap(), want, "{count}");
        assert_eq!(program(&eager, &[], count).unwrap(), want, "{count}");
    }
    let stats = cpu.fusion();
    assert!(stats.launches <= stats.windows && stats.fused >= 4 * stats.windows, "{stats:?}");
    for attrs in [[2], [3]] {
        let want = program(&Device::reference(), &attrs, 4).unwrap();
        assert_eq!(program(&fused, &attrs, 4).unwrap(), want, "{attrs:?}");
        assert_eq!(program(&eager, &attrs, 4).unwrap(), want, "{attrs:?}");
    }
    for device in [&fused, &eager, &Device::reference()] {
        let error = program(device, &[1], 4).unwrap_err();
        assert!(matches!(error.root(), Error::Custom { op, .. } if op == "custom.odd"), "{error}");
    }
}
