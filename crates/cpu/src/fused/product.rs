//! A matrix product and the elementwise nodes after it: bias, activation, residual, cast. Each block of the product goes
//! through them as soon as it is complete, while it is in the cache of the core that computed it.

use super::bind::{Bound, Kept, Mode, Plan};
use super::group::metas;
use super::kernel::is_fusible;
use super::program::{Extent, Program};
use super::schedule::{Schedule, schedule};
use crate::arena::{Arena, Buffer};
use crate::cpu::Context;
use crate::gemm::Block;
use crate::product;
use crate::view::View;
use kiln_device::{Bytes, Error, Place};
use kiln_fuse::{Failure, Fuser, Handles, Optimization, Status, Window};
use kiln_ir::{Id, Node, Op, Shape, infer};
use smallvec::SmallVec;
use std::sync::{Arc, Mutex, OnceLock};

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
}

/// A product and the program after it.
struct Fused {
    /// The product's place among the nodes.
    dot: u32,
    /// Its own result is needed too.
    kept: bool,
    program: Program,
    arena: Arc<Arena>,
    schedules: OnceLock<Option<[Arc<Schedule>; 2]>>,
    bound: Kept,
}

impl Fused {
    fn new(dot: u32, kept: bool, program: Program, arena: Arc<Arena>) -> Fused {
        Fused { dot, kept, program, arena, schedules: OnceLock::new(), bound: Kept::default() }
    }
}

impl Optimization<View> for Fused {
    fn name(&self) -> String {
        "product".into()
    }

    fn len(&self) -> usize {
        self.program.nodes as usize + 1
    }

    fn execute(&self, nodes: &[&Node], dying: &[Id], handles: &mut dyn Handles<View>) -> Result<(), Failure> {
        let cx = Context { arena: &self.arena, place: handles.place() };
        let unfit = || Error::Unsupported { op: "product".into(), device: "cpu".into() };
        let dot = nodes[self.dot as usize];
        let after: SmallVec<[&Node; 128]> =
            nodes.iter().enumerate().filter(|(i, _)| *i != self.dot as usize).map(|(_, &n)| n).collect();
        let Op::Dot { transpose } = dot.op else { return Err(unfit().into()) };
        let get = |id: Id| handles.get(id).cloned().ok_or(Error::UnknownValue(id));
        let (a, b) = (get(dot.ins[0])?, get(dot.ins[1])?);
        let outs = infer(&dot.op, &[a.meta(), b.meta()]).map_err(Error::Op)?;
        let meta = *outs.first().ok_or_else(unfit)?;
        // A product that is only written to memory chosen for it is computed there.
        if let [Node { op: Op::Cast(dtype), outs, .. }] = after[..]
            && (*dtype, self.kept) == (meta.dtype, false)
            && let Some(view) = handles.output_memory(outs[0]).and_then(|memory| cx.fresh_at(meta, memory))
        {
            {
                let rows = Rows::new(&meta.shape, [&view]);
                product::dot_into(transpose, &a, &b, &view, &|block| rows.complete(block))?;
            }
            handles.put(outs[0], view);
            return Ok(());
        }
        let with = With { handles, id: dot.outs[0], view: cx.fresh(meta)? };
        let made = || {
            let metas = metas(&after, &with)?;
            let schedule = |short| schedule(&self.program, &after, |id| Some(metas.get(&id)?.dtype), short);
            Some([Arc::new(schedule(false)?), Arc::new(schedule(true)?)])
        };
        let schedules = self.schedules.get_or_init(made).as_ref();
        let [long, short] = schedules.ok_or_else(unfit)?;
        // The product's operands are read until its last block, so nothing may be written over them.
        let mut free: SmallVec<[Id; 8]> = dying.iter().copied().filter(|id| !dot.ins.contains(id)).collect();
        if !self.kept {
            free.push(dot.outs[0]);
        }
        let plan = Plan { program: &self.program, long, short, parted: true };
        let bound = Bound::new(&cx, &plan, &self.bound, &after, &free, &with)?;
        if bound.shape != meta.shape {
            return Err(unfit().into());
        }
        let _reserved = bound.reserve(&cx)?;
        bound.spend("product", dying, || {
            if matches!(bound.mode, Mode::Short { .. }) {
                product::dot_into(transpose, &a, &b, &with.view, &|_| ())?;
                bound.run();
                return Ok(());
            }
            let rows = Rows::new(&meta.shape, &bound.results);
            let part = |b: Block| {
                bound.part(b.i, b.m, b.j, b.n);
                rows.complete(b);
            };
            product::dot_into(transpose, &a, &b, &with.view, &part)
        })?;
        let With { handles, id, view } = with;
        if self.kept {
            handles.put(id, view);
        }
        self.bound.finish(bound, handles);
        Ok(())
    }
}

/// Which rows of a product are complete, for those who placed the result in memory of their own.
struct Rows<'a> {
    /// The results that somebody waits for, with the bytes of a row.
    placed: SmallVec<[(&'a Buffer, usize); 2]>,
    state: Mutex<Complete>,
}

struct Complete {
    /// Columns of each row that are missing.
    missing: Vec<usize>,
    /// Rows before the first that is not complete.
    rows: usize,
}

impl<'a> Rows<'a> {
    fn new(shape: &Shape, results: impl IntoIterator<Item = &'a View>) -> Rows<'a> {
        let columns = shape.last().copied().unwrap_or(1);
        let results = results.into_iter().filter(|view| view.buffer.is_lent() && view.shape == *shape);
        let placed: SmallVec<[(&Buffer, usize); 2]> =
            results.map(|view| (view.buffer.as_ref(), view.dtype.bytes(columns))).collect();
        let rows = if placed.is_empty() { 0 } else { shape.numel() / columns.max(1) };
        Rows { placed, state: Mutex::new(Complete { missing: vec![columns; rows], rows: 0 }) }
    }

    fn complete(&self, block: Block) {
        if self.placed.is_empty() {
            return;
        }
        let (before, rows) = {
            let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
            let Complete { missing, rows } = &mut *state;
            missing[block.i..block.i + block.m].iter_mut().for_each(|missing| *missing -= block.n);
            let before = *rows;
            while missing.get(*rows) == Some(&0) {
                *rows += 1;
            }
            (before, *rows)
        };
        if rows > before {
            self.placed.iter().for_each(|(buffer, bytes)| buffer.reached(rows * bytes));
        }
    }
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

    fn fail(&mut self, place: usize, nodes: &[&Node], error: Error) {
        self.handles.fail(place, nodes, error)
    }

    fn free(&mut self, id: Id) {
        self.handles.free(id)
    }

    fn place(&self) -> Place {
        self.handles.place()
    }

    fn output_memory(&self, id: Id) -> Option<Bytes> {
        self.handles.output_memory(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool;
    use crate::reference::{self, Value};
    use kiln_device::Host;
    use kiln_ir::{DType, Item};
    use std::collections::HashMap;

    fn window<T>(text: &str, f: impl FnOnce(&Window<'_>) -> T) -> T {
        let program = kiln_ir::text::parse(text).unwrap();
        let metas = kiln_ir::verify(program.clone()).unwrap().metas;
        f(&Window::new(&program.items, |id| metas.get(&id).copied()).unwrap())
    }

    #[test]
    fn what_a_product_needs_is_not_taken_with_it() {
        let text = "x = input f32[4,4]\nw = input f32[4,4]\nz = exp x\ny = dot z w transpose=false";
        window(text, |window| {
            let mut fuser = Product::new(Arena::new(None));
            assert_eq!(fuser.offer(0, window), Status::Closed);
            fuser.reset();
            assert_eq!(fuser.offer(1, window), Status::Open);
            assert!(!fuser.ready());
            assert_eq!(fuser.offer(1, window), Status::Closed);
        });
    }

    /// A device's values, and one that has a place.
    struct Values(HashMap<Id, View>, Option<(Id, Bytes)>);

    impl Handles<View> for Values {
        fn get(&self, id: Id) -> Option<&View> {
            self.0.get(&id)
        }
        fn put(&mut self, id: Id, value: View) {
            self.0.insert(id, value);
        }
        fn run(&mut self, _: usize, node: &Node, _: &[Id]) {
            panic!("{} is run alone", node.op.name())
        }
        fn fail(&mut self, _: usize, _: &[&Node], error: Error) {
            panic!("{error}")
        }
        fn free(&mut self, id: Id) {
            self.0.remove(&id);
        }
        fn place(&self) -> Place {
            Place::Reuse
        }
        fn output_memory(&self, id: Id) -> Option<Bytes> {
            self.1.iter().find(|(placed, _)| *placed == id).map(|(_, memory)| memory.clone())
        }
    }

    /// Memory for a value, and how far it was told to be.
    struct Watched(Buffer, Arc<Mutex<Vec<usize>>>);

    // SAFETY: the buffer's memory, which the test looks at when all is done.
    unsafe impl Host for Watched {
        fn bytes(&self) -> &[u8] {
            self.0.as_slice()
        }
        fn target(&self) -> Option<*mut u8> {
            Some(self.0.as_mut_ptr())
        }
        fn reached(&self, end: usize) {
            self.1.lock().unwrap().push(end);
        }
    }

    #[test]
    fn rows_are_told_of_as_they_are_complete() {
        for dtype in ["f32", "bf16"] {
            let text = format!(
                "x = input f32[128,32]\nw = input f32[32,64]\ny = dot x w transpose=false\nz = cast y dtype={dtype}\nfree y"
            );
            let (program, names) = named(&text);
            let metas = kiln_ir::verify(program.clone()).unwrap().metas;
            let arena = Arena::new(None);
            let cx = Context { arena: &arena, place: Place::Reuse };
            let window = Window::new(&program.items, |id| metas.get(&id).copied()).unwrap();
            let mut fuser = Product::new(arena.clone());
            (0..2).for_each(|at| assert_eq!(fuser.offer(at, &window), Status::Open));
            let nodes: Vec<&Node> = (0..2).filter_map(|at| window.node(at)).collect();
            let bytes = metas[&names["z"]].bytes();
            let told = Arc::new(Mutex::new(Vec::new()));
            let buffer = arena.alloc(bytes, crate::arena::Place::Reuse).unwrap();
            let memory = Bytes::new(Watched(buffer, told.clone()));
            let values = program.inputs.iter().map(|&(id, meta)| {
                (id, cx.filled(meta, &1f32.to_le_bytes().repeat(meta.shape.numel())).unwrap())
            });
            let mut handles = Values(values.collect(), Some((names["z"], memory.clone())));
            fuser.finish(&window).execute(&nodes, &[], &mut handles).unwrap();
            assert_eq!(handles.0[&names["z"]].address().cast_const(), memory.as_ptr(), "{dtype}");
            let told = told.lock().unwrap();
            assert!(told.is_sorted() && told.last() == Some(&bytes), "{dtype}: {told:?}");
            // It is too small to be shared among threads, which begin at several rows.
            assert!(told.len() > 4 && told[0] < bytes / 4, "{dtype}: {told:?}");
        }
    }

    /// All nodes as one group, against the interpreter; `dying` may be written over.
    fn check(text: &str, dying: &[&str]) {
        let (program, names) = named(text);
        let verified = kiln_ir::verify(program.clone()).unwrap();
        let arena = Arena::new(None);
        let cx = Context { arena: &arena, place: Place::Reuse };
        let inputs: HashMap<Id, Value> = (program.inputs.iter())
            .map(|&(id, meta)| {
                let number = |i: usize| ((i * 7919 + id.0 as usize * 31) % 1013) as f32 / 300.0 - 1.6;
                let bytes: Vec<u8> = match meta.dtype {
                    DType::BF16 => (0..meta.shape.numel())
                        .flat_map(|i| half::bf16::from_f32(number(i)).to_le_bytes())
                        .collect(),
                    _ => (0..meta.shape.numel()).flat_map(|i| number(i).to_le_bytes()).collect(),
                };
                (id, Value::from_bytes(meta, &bytes))
            })
            .collect();
        // Without the frees, so that every value is there at the end.
        let mut all = verified.clone();
        all.program.items.retain(|item| matches!(item, Item::Run(_)));
        let want = reference::run(&all, &inputs).unwrap();
        let window = Window::new(&program.items, |id| verified.metas.get(&id).copied()).unwrap();
        let mut fuser = Product::new(arena.clone());
        let places: Vec<usize> = (0..program.items.len()).filter(|&at| window.node(at).is_some()).collect();
        for &at in &places {
            assert_eq!(fuser.offer(at, &window), Status::Open, "{text}: {at}");
        }
        let nodes: Vec<&Node> = places.iter().filter_map(|&at| window.node(at)).collect();
        let dying: Vec<Id> = dying.iter().map(|name| names[*name]).collect();
        for threads in [1, 2, 3] {
            pool::set_threads(threads);
            let views = inputs.iter().map(|(&id, x)| (id, cx.filled(x.meta(), &x.to_bytes()).unwrap()));
            let mut handles = Values(views.collect(), None);
            fuser.finish(&window).execute(&nodes, &dying, &mut handles).unwrap();
            for out in nodes.iter().map(|node| node.outs[0]).filter(|&out| window.leaves(out, &places)) {
                let got = cx.dense(&handles.0[&out]).unwrap();
                assert_eq!(got.bytes(), want[&out].to_bytes(), "{text}: {out:?}, {threads} threads");
            }
        }
    }

    /// A program and the names of its values.
    fn named(text: &str) -> (kiln_ir::Program, HashMap<String, Id>) {
        let program = kiln_ir::text::parse(text).unwrap();
        let mut ids = program.inputs.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        ids.extend(program.items.iter().filter_map(|item| match item {
            Item::Run(node) => Some(node.outs[0]),
            Item::Free(_) => None,
        }));
        let names = text.lines().filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.to_string());
        (program, names.zip(ids).collect())
    }

    #[test]
    fn products_with_epilogues_have_the_bits_of_the_interpreter() {
        for (m, k, n) in
            [(3, 5, 7), (40, 700, 130), (130, 40, 67), (300, 20, 600), (1, 90, 300), (70, 600, 40)]
        {
            let operands = format!("x = input f32[{m},{k}]\nw = input f32[{k},{n}]\n");
            // Bias and activation; what comes before the activation is needed too.
            let bias = format!(
                "{operands}b = input f32[{n}]\ny = dot x w transpose=false\nz = add y b\nu = gelu_tanh z\nfree y"
            );
            check(&bias, &[]);
            // A residual that may be written over, and a number.
            let residual = format!(
                "{operands}r = input f32[{m},{n}]\nc = full shape=[] value=f32:0.5\ny = dot x w transpose=false\nz = mul y c\nu = add z r\nfree y\nfree z"
            );
            check(&residual, &["r"]);
            // The product itself is needed, and a narrower type.
            check(&format!("{operands}y = dot x w transpose=false\nz = cast y dtype=bf16"), &[]);
            check(&format!("{operands}y = dot x w transpose=false\nz = cast y dtype=bf16\nfree y"), &[]);
        }
        // Square operands, which have the result's shape and end here, are not written over before they are read.
        let square = "x = input f32[200,200]\nw = input f32[200,200]\ny = dot x w transpose=false\nz = add y x\nu = exp z\nfree y\nfree z";
        check(square, &["x", "w"]);
        let batched = "x = input f32[3,70,20]\nw = input f32[3,20,90]\nb = input f32[3,1,90]\ny = dot x w transpose=false\nz = add y b\nfree y";
        check(batched, &[]);
        let half = "x = input bf16[70,600]\nw = input bf16[600,90]\nb = input bf16[90]\ny = dot x w transpose=false\nz = add y b\nu = relu z\nfree y\nfree z";
        check(half, &[]);
    }
}
