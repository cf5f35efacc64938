//! A matrix product and the elementwise nodes after it: bias, activation, residual, cast. Each block of the product goes
//! through them as soon as it is complete, while it is in the cache of the core that computed it.

use super::bind::{Bound, Mode, Plan, puts};
use super::fused::dtypes;
use super::kernel::is_fusible;
use super::program::{Extent, Program};
use super::schedule::{Schedule, schedule};
use crate::arena::Arena;
use crate::cpu::Context;
use crate::gemm::Block;
use crate::product;
use crate::view::View;
use kiln_device::{Error, Place};
use kiln_fuse::{Fuser, Handles, Optimization, Status, Window};
use kiln_ir::{Id, Node, Op, Shape, infer};
use smallvec::SmallVec;
use std::sync::{Arc, OnceLock};

/// Collects a product, elementwise nodes of its shape that come after it, and the numbers they use.
pub(crate) struct Product {
    arena: Arc<Arena>,
    places: Vec<usize>,
    /// Where the product is among the places, and its shape.
    dot: Option<(usize, Shape)>,
    status: Status,
}

impl Product {
    pub fn new(arena: Arc<Arena>) -> Product {
        Product { arena, places: Vec::new(), dot: None, status: Status::Open }
    }

    fn takes(&mut self, node: &Node, window: &Window<'_>) -> bool {
        let meta = |id: Id| window.meta(id);
        match (&node.op, self.dot) {
            (Op::Full { shape, .. }, _) => shape.is_empty(),
            (Op::Dot { .. }, None) => {
                let out = meta(node.outs[0]);
                let plain = node.ins.iter().all(|&id| meta(id).dtype == out.dtype);
                let made = |id: &Id| window.maker(*id).is_some_and(|m| self.places.contains(&m));
                self.dot = Some((self.places.len(), out.shape));
                plain && out.dtype.is_float() && !node.ins.iter().any(made)
            }
            (_, Some((_, shape))) => {
                is_fusible(node, |id| meta(id).dtype) && meta(node.outs[0]).shape == shape
            }
            _ => false,
        }
    }

    /// The places without the product's.
    fn after(&self) -> Vec<usize> {
        let dot = self.dot.map_or(usize::MAX, |(at, _)| at);
        self.places.iter().enumerate().filter(|(i, _)| *i != dot).map(|(_, &at)| at).collect()
    }
}

impl Fuser<View> for Product {
    fn name(&self) -> &'static str {
        "product"
    }

    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status {
        let taken =
            self.status == Status::Open && window.node(at).is_some_and(|node| self.takes(node, window));
        if taken {
            self.places.push(at);
        } else {
            self.status = Status::Closed;
        }
        self.status
    }

    fn status(&self) -> Status {
        self.status
    }

    fn score(&self, window: &Window<'_>) -> f64 {
        super::saved(window, &self.places)
    }

    fn ready(&self) -> bool {
        self.dot.is_some_and(|(dot, _)| self.places.len() > dot + 1)
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn reset(&mut self) {
        *self = Product::new(self.arena.clone());
    }

    fn boxed(&self) -> Box<dyn Fuser<View>> {
        let (arena, places) = (self.arena.clone(), self.places.clone());
        Box::new(Product { arena, places, dot: self.dot, status: self.status })
    }

    fn finish(&self, window: &Window<'_>) -> Arc<dyn Optimization<View>> {
        let program = Program::new(window, &self.after(), Some(1), |_| Extent::Wide);
        let (dot, _) = self.dot.expect("ready only with a product");
        let out = window.node(self.places[dot]).map(|node| node.outs[0]);
        let kept = out.is_some_and(|out| window.leaves(out, &self.places));
        Arc::new(Fused::new(dot as u32, kept, program, self.arena.clone()))
    }

    fn rebuild(&self, state: &[u8]) -> Option<Arc<dyn Optimization<View>>> {
        let (dot, kept, program) = decode(state)?;
        Some(Arc::new(Fused::new(dot, kept, program, self.arena.clone())))
    }
}

/// A product and the program after it.
struct Fused {
    /// The product's place among the nodes.
    dot: u32,
    /// Its own result is needed too.
    kept: bool,
    program: Program,
    arena: Arc<Arena>,
    schedules: OnceLock<Option<[Schedule; 2]>>,
}

impl Fused {
    fn new(dot: u32, kept: bool, program: Program, arena: Arc<Arena>) -> Fused {
        Fused { dot, kept, program, arena, schedules: OnceLock::new() }
    }
}

impl Optimization<View> for Fused {
    fn name(&self) -> String {
        "product".into()
    }

    fn len(&self) -> usize {
        self.program.nodes as usize + 1
    }

    fn execute(&self, nodes: &[&Node], dying: &[Id], handles: &mut dyn Handles<View>) -> Result<(), Error> {
        let cx = Context { arena: &self.arena, place: handles.place() };
        let unfit = || Error::Unsupported { op: "product".into(), device: "cpu".into() };
        let dot = nodes[self.dot as usize];
        let after: SmallVec<[&Node; 16]> =
            nodes.iter().enumerate().filter(|(i, _)| *i != self.dot as usize).map(|(_, &n)| n).collect();
        let Op::Dot { transpose } = dot.op else { return Err(unfit()) };
        let get = |id: Id| handles.get(id).cloned().ok_or(Error::UnknownValue(id));
        let (a, b) = (get(dot.ins[0])?, get(dot.ins[1])?);
        let meta = *infer(&dot.op, &[a.meta(), b.meta()])?.first().ok_or_else(unfit)?;
        let with = With { handles, id: dot.outs[0], view: cx.fresh(meta)? };
        let made = || {
            let dtypes = dtypes(&after, &with)?;
            let schedule = |short| schedule(&self.program, &after, |id| dtypes.get(&id).copied(), short);
            Some([schedule(false)?, schedule(true)?])
        };
        let schedules = self.schedules.get_or_init(made).as_ref();
        let [long, short] = schedules.ok_or_else(unfit)?;
        // The product's operands are read until its last block, so nothing may be written over them.
        let mut free: SmallVec<[Id; 8]> = dying.iter().copied().filter(|id| !dot.ins.contains(id)).collect();
        if !self.kept {
            free.push(dot.outs[0]);
        }
        let plan = Plan { program: &self.program, long, short };
        let bound = Bound::new(&cx, &plan, &after, &free, &with)?;
        if bound.shape != meta.shape {
            return Err(unfit());
        }
        let puts = puts(&cx, &self.program, &bound, &after)?;
        if matches!(bound.mode, Mode::Short { .. }) {
            product::dot_into(transpose, &a, &b, &with.view, &|_| ())?;
            bound.run();
        } else {
            let part = |b: Block| bound.part(b.i, b.m, b.j, b.n);
            product::dot_into(transpose, &a, &b, &with.view, &part)?;
        }
        drop(bound);
        let With { handles, id, view } = with;
        if self.kept {
            handles.put(id, view);
        }
        puts.into_iter().for_each(|(id, view)| handles.put(id, view));
        Ok(())
    }

    fn state(&self) -> Vec<u8> {
        let mut bytes = self.dot.to_le_bytes().to_vec();
        bytes.push(self.kept as u8);
        bytes.extend(self.program.encode());
        bytes
    }
}

/// What [`Fused::state`] wrote, if these bytes are one whose parts fit together.
fn decode(state: &[u8]) -> Option<(u32, bool, Program)> {
    let (dot, rest) = state.split_first_chunk::<4>()?;
    let (&kept, rest) = rest.split_first()?;
    let (dot, program) = (u32::from_le_bytes(*dot), Program::decode(rest)?);
    let fits = dot <= program.nodes && kept <= 1 && program.inner == Some(1);
    fits.then_some((dot, kept == 1, program))
}

/// A device's values, and the product that is not among them yet.
struct With<'a> {
    handles: &'a mut dyn Handles<View>,
    id: Id,
    view: View,
}

impl Handles<View> for With<'_> {
    fn get(&self, id: Id) -> Option<&View> {
        if id == self.id { Some(&self.view) } else { self.handles.get(id) }
    }

    fn put(&mut self, id: Id, value: View) {
        self.handles.put(id, value)
    }

    fn run(&mut self, place: usize, node: &Node, dying: &[Id]) {
        self.handles.run(place, node, dying)
    }

    fn free(&mut self, id: Id) {
        self.handles.free(id)
    }

    fn place(&self) -> Place {
        self.handles.place()
    }
}

#[cfg(test)]
mod tests {
    use super::super::source;
    use super::*;

    const TEXT: &str = "x = input f32[4,3]\nw = input f32[3,2]\nb = input f32[2]\nn = full shape=[] value=f32:2.0\n\
        y = dot x w\nz = add y b\nu = mul z n\nfree y\nfree z";

    fn window<T>(text: &str, f: impl FnOnce(&Window<'_>) -> T) -> T {
        let program = kiln_ir::text::parse(text).unwrap();
        let metas = kiln_ir::verify(program.clone()).unwrap().metas;
        f(&Window::new(&program.items, |id| metas.get(&id).copied()).unwrap())
    }

    #[test]
    fn a_product_and_what_follows_are_read_back_as_they_were() {
        window(TEXT, |window| {
            let mut fuser = Product::new(Arena::new(None));
            for at in 0..4 {
                assert_eq!(fuser.offer(at, window), Status::Open, "{at}");
            }
            assert!(fuser.ready());
            let state = fuser.finish(window).state();
            let (dot, kept, program) = decode(&state).unwrap();
            assert_eq!((dot, kept, program.nodes), (1, false, 3));
            source::check_form(&state, &(dot, kept, program), decode);
        });
    }

    #[test]
    fn what_a_product_needs_is_not_taken_with_it() {
        let text = "x = input f32[4,4]\nw = input f32[4,4]\nz = exp x\ny = dot z w";
        window(text, |window| {
            let mut fuser = Product::new(Arena::new(None));
            assert_eq!(fuser.offer(0, window), Status::Closed);
            fuser.reset();
            assert_eq!(fuser.offer(1, window), Status::Open);
            assert!(!fuser.ready());
            assert_eq!(fuser.offer(1, window), Status::Closed);
        });
    }
}
