//! Nodes around reductions as one pass over memory: softmax, norms, losses, their backward, sums of squares.
//!
//! A tensor is seen as rows of its last axes. Values have an element for each place, or one for each row: what a
//! reduction of rows gives and what is computed from such. Rows can also be reduced onto each other, which gives a row,
//! and an element of each row can be read or changed by index.

use super::group::Fused;
use super::kernel::is_fusible;
use super::program::{Extent, Program};
use crate::arena::Arena;
use crate::reduction;
use crate::reference::order::{INNER, OUTER, order};
use crate::view::View;
use kiln_fuse::{Fuser, Optimization, Status, Window};
use kiln_ir::{AxisSet, DType, GatherKind, Id, Move, Node, Op, ReduceKind, ScatterKind, Shape, broadcast};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// What a value is to a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Is(Extent),
    /// The same number everywhere.
    Number,
    /// A number everywhere but at an index of each row.
    Scattered,
}

/// Collects elementwise nodes and reductions over the same rows.
#[derive(Clone)]
pub(crate) struct Rows {
    arena: Arc<Arena>,
    places: Vec<usize>,
    forms: FxHashMap<Id, Form>,
    /// Values that are different at the indices given there.
    poked: FxHashMap<Id, Id>,
    wide: Option<Shape>,
    /// How many last axes make a row.
    inner: Option<usize>,
    /// A number that is scattered to is not here yet.
    waits: bool,
    status: Status,
}

impl Rows {
    pub fn new(arena: Arc<Arena>) -> Rows {
        Rows {
            arena,
            places: Vec::new(),
            forms: FxHashMap::default(),
            poked: FxHashMap::default(),
            wide: None,
            inner: None,
            waits: false,
            status: Status::Open,
        }
    }

    /// The form of a node's result, if the node fits.
    fn form(&mut self, node: &Node, window: &Window<'_>) -> Option<Form> {
        match &node.op {
            Op::Full { shape, .. } if shape.is_empty() => Some(Form::Number),
            Op::Full { shape, .. } => (*self.wide.get_or_insert(*shape) == *shape).then_some(Form::Number),
            Op::Reduce { kind, axes, keep } => self.reduce(node, window, *kind, *axes, *keep),
            Op::Move(Move::Reshape(shape)) => self.reshape(node.ins[0], shape),
            Op::Move(Move::Expand(shape)) => {
                let kept = self.forms.get(&node.ins[0])? == &Form::Is(Extent::Kept);
                (kept && *shape == self.wide?).then_some(Form::Is(Extent::Wide))
            }
            Op::Gather { kind: GatherKind::Each, axis } => {
                self.index(node, window, *axis)?;
                self.is_wide(node.ins[0], window).then_some(())?;
                // Elsewhere than at its own indices, a changed value is not known for one element.
                let fits = self.poked.get(&node.ins[0]).is_none_or(|index| *index == node.ins[1]);
                fits.then_some(Form::Is(Extent::Kept))
            }
            Op::Scatter { kind: ScatterKind::EachAdd, axis } => self.scatter(node, window, *axis),
            _ if is_fusible(node, |id| window.meta(id).dtype) => self.elementwise(node, window),
            _ => None,
        }
    }

    fn reduce(
        &mut self,
        node: &Node,
        window: &Window<'_>,
        kind: ReduceKind,
        axes: AxisSet,
        keep: bool,
    ) -> Option<Form> {
        let (id, x) = (node.ins[0], window.meta(node.ins[0]));
        let wide = *self.wide.get_or_insert(x.shape);
        let out = window.meta(node.outs[0]);
        let known = reduction::has_kernel(kind, out.dtype) && out.dtype == x.dtype;
        if x.shape != wide || wide.contains(&0) || axes.is_empty() || !known {
            return None;
        }
        let (rank, count) = (wide.len(), axes.len());
        let reduced: usize = axes.iter().map(|axis| wide[axis]).product();
        let is = order(&wide, axes);
        let (inner, form) = if axes.iter().all(|axis| axis >= rank - count) && (is == INNER || reduced == 1) {
            (count, if keep { Extent::Kept } else { Extent::Gone })
        } else if axes.bound() == count && is == OUTER {
            (rank - count, if keep { Extent::ColumnKept } else { Extent::Column })
        } else {
            return None;
        };
        if *self.inner.get_or_insert(inner) != inner {
            return None;
        }
        let narrow = matches!(form, Extent::Kept | Extent::Gone);
        match self.forms.get(&id) {
            // The sum of zeros and one other number is that number.
            Some(Form::Scattered) => {
                (kind == ReduceKind::Sum && narrow && x.dtype.is_float()).then_some(Form::Is(form))
            }
            Some(Form::Is(Extent::Wide)) | None => (!self.poked.contains_key(&id)).then_some(Form::Is(form)),
            Some(Form::Is(_) | Form::Number) => None,
        }
    }

    fn reshape(&self, id: Id, shape: &Shape) -> Option<Form> {
        let is = |extent: Extent| self.shape(extent) == Some(*shape);
        let options = match self.forms.get(&id)? {
            Form::Is(Extent::Kept | Extent::Gone) => [Extent::Kept, Extent::Gone],
            Form::Is(Extent::Column | Extent::ColumnKept) => [Extent::ColumnKept, Extent::Column],
            Form::Is(Extent::Wide) | Form::Number | Form::Scattered => return None,
        };
        options.into_iter().find(|&extent| is(extent)).map(Form::Is)
    }

    /// The shape of values of an extent, once that is known.
    fn shape(&self, extent: Extent) -> Option<Shape> {
        let (wide, inner) = (self.wide?, self.inner?);
        let cut = wide.len().checked_sub(inner)?;
        let axes = |range: std::ops::Range<usize>| range.fold(AxisSet::default(), AxisSet::with);
        Some(match extent {
            Extent::Wide => wide,
            Extent::Kept => wide.reduced(axes(cut..wide.len()), true),
            Extent::Gone => wide.reduced(axes(cut..wide.len()), false),
            Extent::ColumnKept => wide.reduced(axes(0..cut), true),
            Extent::Column => wide.reduced(axes(0..cut), false),
        })
    }

    /// Whether a value has all elements itself.
    fn is_wide(&mut self, id: Id, window: &Window<'_>) -> bool {
        let shape = window.meta(id).shape;
        match self.forms.get(&id) {
            Some(Form::Is(extent)) => *extent == Extent::Wide,
            Some(Form::Number | Form::Scattered) => false,
            None => *self.wide.get_or_insert(shape) == shape,
        }
    }

    /// Whether the second operand is an index from outside for each row of the last axis.
    fn index(&mut self, node: &Node, window: &Window<'_>, axis: u8) -> Option<()> {
        let (x, index) = (window.meta(node.ins[0]), window.meta(node.ins[1]));
        let wide = *self.wide.get_or_insert(x.shape);
        let fits = x.shape == wide
            && axis as usize + 1 == wide.len()
            && *self.inner.get_or_insert(1) == 1
            && self.shape(Extent::Kept) == Some(index.shape)
            && matches!(index.dtype, DType::I64 | DType::I32)
            && !self.forms.contains_key(&node.ins[1]);
        fits.then_some(())
    }

    /// A value that is another at an index of each row.
    fn scatter(&mut self, node: &Node, window: &Window<'_>, axis: u8) -> Option<Form> {
        self.index(node, window, axis)?;
        let (zeros, index, source) = (node.ins[0], node.ins[1], node.ins[2]);
        let number = |id: Id| {
            let maker = window.maker(id).and_then(|at| window.node(at));
            maker.is_some_and(|node| matches!(node.op, Op::Full { .. }))
        };
        let base = match self.forms.get(&zeros) {
            Some(Form::Number) => true,
            None => number(zeros),
            Some(Form::Is(_) | Form::Scattered) => false,
        };
        let added = match self.forms.get(&source) {
            Some(form) => *form == Form::Is(Extent::Kept),
            None => Some(window.meta(source).shape) == self.shape(Extent::Kept),
        };
        if !base || !added {
            return None;
        }
        self.waits |= !self.forms.contains_key(&zeros);
        self.poked.insert(node.outs[0], index);
        Some(Form::Scattered)
    }

    fn elementwise(&mut self, node: &Node, window: &Window<'_>) -> Option<Form> {
        let shape = window.meta(node.outs[0]).shape;
        let wide = *self.wide.get_or_insert(shape);
        let options = [Extent::Wide, Extent::Kept, Extent::Gone];
        let is = |extent: &Extent| match extent {
            Extent::Wide => shape == wide,
            other => self.shape(*other) == Some(shape),
        };
        // Where rows have one element, a value can be several things.
        let fits = |extent: &Extent| {
            is(extent)
                && node.ins.iter().all(|id| match (self.forms.get(id), extent) {
                    (Some(Form::Number), _) => true,
                    (Some(Form::Scattered), _) => *extent == Extent::Wide,
                    (Some(Form::Is(is)), Extent::Wide) => matches!(is, Extent::Wide | Extent::Kept),
                    (Some(Form::Is(is)), _) => is == extent,
                    (None, _) => broadcast(&window.meta(*id).shape, &shape) == Some(shape),
                })
        };
        let form = options.into_iter().find(fits)?;
        let mut indices = node.ins.iter().filter_map(|id| self.poked.get(id).copied());
        if let Some(index) = indices.next() {
            if form != Extent::Wide || indices.any(|other| other != index) {
                return None;
            }
            self.poked.insert(node.outs[0], index);
        }
        Some(Form::Is(form))
    }
}

impl Fuser<View> for Rows {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status {
        let form = match (self.status, window.node(at)) {
            (Status::Open, Some(node)) => self.form(node, window).map(|form| (node.outs[0], form)),
            _ => None,
        };
        match form {
            Some((out, form)) => {
                self.forms.insert(out, form);
                self.places.push(at);
            }
            None => self.status = Status::Closed,
        }
        self.status
    }

    fn status(&self) -> Status {
        self.status
    }

    fn score(&self, window: &Window<'_>) -> f64 {
        // What is scattered has no memory of its own, so nobody else may need it.
        let scattered =
            |(id, form): (&Id, &Form)| *form == Form::Scattered && window.leaves(*id, &self.places);
        if self.forms.iter().any(scattered) {
            return f64::MIN;
        }
        super::saved(window, &self.places)
    }

    fn ready(&self) -> bool {
        self.inner.is_some() && self.wide.is_some() && !self.waits
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn reset(&mut self) {
        *self = Rows::new(self.arena.clone());
    }

    fn boxed(&self) -> Box<dyn Fuser<View>> {
        Box::new(self.clone())
    }

    fn finish(&self, window: &Window<'_>) -> Arc<dyn Optimization<View>> {
        let extent = |id: Id| match self.forms.get(&id) {
            Some(Form::Is(extent)) => *extent,
            Some(Form::Number | Form::Scattered) | None => Extent::Wide,
        };
        let program = Program::new(window, &self.places, self.inner, extent);
        Arc::new(Fused::new(self.name(), program, self.arena.clone()))
    }
}
