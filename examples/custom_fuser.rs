//! A fuser of one's own: it runs `exp` followed by a product as one pass, on any device that fuses.
//!
//!     cargo run --example custom_fuser
//!
//! It knows nothing of the device: it takes nodes by their operations and reads and writes values as host data.

use kiln::device::{Bytes, Cpu, Data};
use kiln::fuse::{Failure, Fuser, Handles, NewPlan, Observer, Optimization, Status, Window};
use kiln::ir::{Binary, Id, Node, Op, Unary};
use kiln::prelude::*;
use std::sync::{Arc, Mutex};

/// Takes an `exp` of f32 and the product that alone uses it.
#[derive(Clone, Default)]
struct ExpMul {
    places: Vec<usize>,
    closed: bool,
}

impl ExpMul {
    fn fits(&self, at: usize, window: &Window<'_>) -> bool {
        let Some(node) = window.node(at) else { return false };
        match (&self.places[..], &node.op) {
            ([], Op::Unary(Unary::Exp)) => window.meta(node.ins[0]).dtype == DType::F32,
            (&[first], Op::Binary(Binary::Mul)) => {
                let exp = window.node(first).map(|n| n.outs[0]);
                let same = window.meta(node.ins[0]).shape == window.meta(node.ins[1]).shape;
                same && exp == Some(node.ins[0])
                    && node.ins[1] != node.ins[0]
                    && !window.leaves(node.ins[0], &[first, at])
            }
            _ => false,
        }
    }
}

impl<V> Fuser<V> for ExpMul {
    fn name(&self) -> &'static str {
        "expmul"
    }

    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status {
        match !self.closed && self.fits(at, window) {
            true => self.places.push(at),
            false => self.closed = true,
        }
        Fuser::<V>::status(self)
    }

    fn status(&self) -> Status {
        if self.closed { Status::Closed } else { Status::Open }
    }

    fn score(&self, _: &Window<'_>) -> f64 {
        // More than anything the device's own fusers could save: this is an example.
        if self.places.len() == 2 { 1e12 } else { 0.0 }
    }

    fn ready(&self) -> bool {
        self.places.len() == 2
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn reset(&mut self) {
        *self = ExpMul::default();
    }

    fn boxed(&self) -> Box<dyn Fuser<V>> {
        Box::new(self.clone())
    }

    fn finish(&self, _: &Window<'_>) -> Arc<dyn Optimization<V>> {
        Arc::new(Pass)
    }
}

/// What runs the two nodes. It has no state: everything is in the nodes.
struct Pass;

impl<V> Optimization<V> for Pass {
    fn name(&self) -> String {
        "expmul".into()
    }

    fn len(&self) -> usize {
        2
    }

    fn execute(&self, nodes: &[&Node], _: &[Id], handles: &mut dyn Handles<V>) -> Result<(), Failure> {
        let (x, y) = (handles.read(nodes[0].ins[0])?, handles.read(nodes[1].ins[1])?);
        let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let pairs = x.bytes.chunks_exact(4).zip(y.bytes.chunks_exact(4));
        let out: Vec<u8> = pairs.flat_map(|(x, y)| (number(x).exp() * number(y)).to_le_bytes()).collect();
        Ok(handles.write(nodes[1].outs[0], Data::new(x.meta, Bytes::new(out)))?)
    }
}

/// Keeps the text of every plan.
struct Plans(Arc<Mutex<String>>);

impl Observer for Plans {
    fn planned(&mut self, plan: &NewPlan<'_>) {
        self.0.lock().unwrap().push_str(plan.text);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (cpu, plans) = (Arc::new(Cpu::start()), Arc::new(Mutex::default()));
    cpu.add_fuser(Box::new(ExpMul::default()));
    cpu.observe(Box::new(Plans(Arc::clone(&plans))));
    let device = Device::wrap("cpu with expmul", cpu.clone())?;

    let x = Tensor::from_vec(vec![0.0f32, 1.0, -1.0], [3], &device);
    let y = Tensor::from_vec(vec![2.0f32, 3.0, 4.0], [3], &device);
    for _ in 0..3 {
        let z = x.exp() * &y;
        let want: Vec<f32> =
            [0.0f32, 1.0, -1.0].iter().zip([2.0, 3.0, 4.0]).map(|(x, y)| x.exp() * y).collect();
        assert_eq!(z.to_vec::<f32>()?, want);
    }
    println!("{}", plans.lock().unwrap());
    assert!(plans.lock().unwrap().contains("expmul of 2: exp mul"));
    println!("{:?}", cpu.fusion());
    // The first window frees nothing of a round before; the others are alike.
    assert_eq!((cpu.fusion().planned, cpu.fusion().fallbacks), (2, 0));
    Ok(())
}
