//! Running cases at the seam: operands in, one batch, results out, compared.

use super::cases::Case;
use super::{Problem, Suite};
use kiln_cpu::reference::{self, Value};
use kiln_device::{Batch, Bytes, Data, Error, Place, Urgency};
use kiln_ir::*;
use std::collections::HashMap;

/// How an operand gets to the device: as it is, or as the result of moves on something else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Layout {
    Dense,
    Permuted,
    Sliced,
    Flipped,
    Expanded,
}

const LAYOUTS: [Layout; 5] =
    [Layout::Dense, Layout::Permuted, Layout::Sliced, Layout::Flipped, Layout::Expanded];

impl Layout {
    /// What is uploaded, and the move that makes the operand of it. An expanded operand is the given one's first slice
    /// repeated.
    fn base(self, x: &Value) -> Option<(Value, Op)> {
        let (rank, shape) = (x.shape.len(), x.shape);
        if x.data.dtype().is_quantised() {
            return None;
        }
        let moved =
            |op: Move, ins: &[&Value]| reference::eval(&Op::Move(op), ins).ok().map(|mut v| v.swap_remove(0));
        match self {
            Layout::Dense => None,
            Layout::Permuted => {
                let order = Dims::collect((0..rank as u8).rev());
                (rank > 1).then(|| {
                    moved(Move::Permute(order), &[x]).map(|base| (base, Op::Move(Move::Permute(order))))
                })?
            }
            Layout::Sliced => {
                let axis = rank.checked_sub(1)?;
                let mut wider = x.meta();
                wider.shape[axis] = 2 * shape[axis] + 2;
                let (start, end) = (1, 1 + 2 * shape[axis]);
                let assign = Move::Assign { axis: axis as u8, start, end, step: 2 };
                let base = moved(assign, &[&Value::zeros(wider), x])?;
                Some((base, Op::Move(Move::Slice { axis: axis as u8, start, end, step: 2 })))
            }
            Layout::Flipped => {
                let flip = Move::Flip(AxisSet::all(rank));
                (rank > 0).then(|| moved(flip, &[x]).map(|base| (base, Op::Move(flip))))?
            }
            Layout::Expanded => {
                let axis = shape.iter().position(|&d| d > 1)?;
                let first = moved(Move::Slice { axis: axis as u8, start: 0, end: 1, step: 1 }, &[x])?;
                Some((first, Op::Move(Move::Expand(shape))))
            }
        }
    }
}

impl Suite<'_> {
    /// A new name for a value, none that a recording side draws, should the device be shared with one.
    pub fn fresh(&mut self) -> Id {
        self.drawn += 1;
        Id::TOOLS.at(self.drawn)
    }

    /// Uploads a value under a new name.
    pub fn write(&mut self, x: &Value) -> Id {
        let id = self.fresh();
        self.device.write(id, Data::new(x.meta(), Bytes::new(x.to_bytes())), Place::Reuse);
        id
    }

    pub fn submit(&self, items: Vec<Item>) {
        self.device.submit(Batch {
            items,
            origins: Vec::new(),
            place: Place::Reuse,
            urgency: Urgency::Awaited,
        });
    }

    pub fn free(&self, ids: impl IntoIterator<Item = Id>) {
        self.submit(ids.into_iter().map(Item::Free).collect());
    }

    pub fn read(&self, id: Id) -> Result<Value, Error> {
        let data = self.device.read(id).wait()?;
        Ok(Value::from_bytes(data.meta, &data.bytes))
    }

    /// Runs a case in its layouts, with frees early and late.
    pub fn case(&mut self, case: &Case) {
        let alike = case.ins.len() > 1;
        let mut turns = vec![(Layout::Dense, Layout::Dense)];
        if case.strided {
            turns.extend((0..LAYOUTS.len()).map(|k| (LAYOUTS[k], LAYOUTS[(k + 1) % LAYOUTS.len()])));
            turns.extend(LAYOUTS[1..].iter().filter(|_| alike).map(|&l| (l, l)));
        }
        for (turn, (first, other)) in turns.into_iter().enumerate() {
            let layouts = (0..case.ins.len()).map(|i| if i % 2 == 0 { first } else { other });
            self.turn(case, layouts.collect(), turn % 2 == 0);
        }
    }

    fn turn(&mut self, case: &Case, layouts: Vec<Layout>, late: bool) {
        self.totals.cases += 1;
        let metas: Vec<Meta> = case.ins.iter().map(Value::meta).collect();
        if !self.device.supports(&case.op, &metas) {
            return self.lowered(case);
        }
        let name = || format!("{} : {metas:?} {layouts:?}", case.op);
        let (mut ins, mut names, mut items, mut bases) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (x, layout) in case.ins.iter().zip(&layouts) {
            match layout.base(x) {
                Some((base, op)) => {
                    let made = reference::eval(&op, &[&base]).expect("layouts fit").swap_remove(0);
                    let (from, to) = (self.write(&base), self.fresh());
                    items.push(Item::Run(Node::new(op, &[from], &[to])));
                    bases.push(from);
                    ins.push(made);
                    names.push(to);
                }
                None => {
                    names.push(self.write(x));
                    ins.push(x.clone());
                }
            }
        }
        let wants = match reference::eval(&case.op, &ins.iter().collect::<Vec<_>>()) {
            Ok(wants) => wants,
            Err(e) => panic!("the interpreter fails on {}: {e}", name()),
        };
        let outs: Vec<Id> = wants.iter().map(|_| self.fresh()).collect();
        if !late {
            items.extend(bases.iter().copied().map(Item::Free));
        }
        items.push(Item::Run(Node::new(case.op.clone(), &names, &outs)));
        if !late {
            items.extend(names.iter().copied().map(Item::Free));
        }
        self.submit(items);
        for (i, (id, want)) in outs.iter().zip(&wants).enumerate() {
            self.compare(&name, &format!("result {i}"), &case.op, *id, want);
        }
        if late {
            for (i, (id, want)) in names.iter().zip(&ins).enumerate() {
                self.compare(
                    &name,
                    &format!("operand {i}"),
                    &Op::Move(Move::Flip(AxisSet::default())),
                    *id,
                    want,
                );
            }
            self.free(bases.into_iter().chain(names));
        }
        self.free(outs);
    }

    /// Reads a value and reports where it is not `want`, as `op` may differ.
    pub fn compare(&mut self, case: &dyn Fn() -> String, of: &str, op: &Op, id: Id, want: &Value) {
        self.compare_nans(case, of, op, !moves_only(op), id, want);
    }

    /// The same, with `any_nan` if it does not matter which NaN a NaN is.
    pub fn compare_nans(
        &mut self,
        case: &dyn Fn() -> String,
        of: &str,
        op: &Op,
        any_nan: bool,
        id: Id,
        want: &Value,
    ) {
        let problem = match self.read(id) {
            Err(error) => Some(Problem::Failed { of: of.into(), error }),
            Ok(got) if got.meta() != want.meta() => {
                Some(Problem::Meta { of: of.into(), want: want.meta(), got: got.meta() })
            }
            Ok(got) => {
                let allowed = (self.options.ulps)(op, want.data.dtype());
                difference(want, &got, allowed, any_nan).map(|(element, want, got)| Problem::Value {
                    of: of.into(),
                    element,
                    want,
                    got,
                })
            }
        };
        if let Some(problem) = problem {
            self.found(&case(), problem);
        }
    }

    /// Values of names, for scenarios that keep a table of what should be there.
    pub fn compare_all(&mut self, case: &str, wants: &HashMap<Id, Value>) {
        for (id, want) in wants {
            self.compare(
                &|| case.to_string(),
                &id.to_string(),
                &Op::Move(Move::Flip(AxisSet::default())),
                *id,
                want,
            );
        }
    }
}

/// Whether results are operands' elements, bit for bit, NaNs included. Arithmetic may give any NaN.
fn moves_only(op: &Op) -> bool {
    match op {
        Op::Full { .. }
        | Op::Select
        | Op::Move(_)
        | Op::Gather { .. }
        | Op::Sort { .. }
        | Op::Guard { .. }
        | Op::Commit => true,
        Op::Scatter { kind, .. } => match kind {
            ScatterKind::Each => true,
            ScatterKind::EachAdd | ScatterKind::TakeAdd => false,
        },
        Op::Iota { .. }
        | Op::Random { .. }
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Cast(_)
        | Op::Reduce { .. }
        | Op::Scan { .. }
        | Op::Dot { .. }
        | Op::Conv { .. }
        | Op::Pool { .. }
        | Op::Named(_)
        | Op::Custom(_) => false,
    }
}

/// The first element that differs by more than `allowed` units in the last place, with both values.
fn difference(want: &Value, got: &Value, allowed: u64, any_nan: bool) -> Option<(usize, String, String)> {
    let dtype = want.data.dtype();
    let (a, b) = (want.to_bytes(), got.to_bytes());
    if a == b {
        return None;
    }
    let size = if dtype.is_quantised() { 1 } else { dtype.size() };
    let word = |b: &[u8]| b.iter().rev().fold(0u64, |n, &b| n << 8 | b as u64);
    let differs = |a: u64, b: u64| {
        if a == b {
            return false;
        }
        if !dtype.is_float() {
            return true;
        }
        let (x, y) = (Scalar::from_bits(dtype, a), Scalar::from_bits(dtype, b));
        match (x.to_f64().is_nan(), y.to_f64().is_nan()) {
            (true, true) => !any_nan,
            (true, false) | (false, true) => true,
            (false, false) => place(x).abs_diff(place(y)) > allowed,
        }
    };
    let show = |bits: u64| {
        if dtype.is_quantised() { format!("{bits:#x}") } else { Scalar::from_bits(dtype, bits).to_string() }
    };
    let words = a.chunks(size).map(word).zip(b.chunks(size).map(word)).enumerate();
    words.into_iter().find(|&(_, (a, b))| differs(a, b)).map(|(i, (a, b))| (i, show(a), show(b)))
}

/// A float's place among all floats of its dtype; both zeros have neighbouring places.
fn place(x: Scalar) -> i64 {
    let top = 8 * x.dtype().size() as u32 - 1;
    let magnitude = (x.bits() & ((1u64 << top) - 1)) as i64;
    if x.bits() >> top & 1 == 1 { -magnitude - 1 } else { magnitude }
}
