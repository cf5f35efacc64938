//! A pass as lane operations in static single assignment: what one vector of elements goes through, each operation
//! about one instruction. Equal operations on equal values are one node.

use rustc_hash::FxHashMap;

/// The instruction sets that code is emitted for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Target {
    /// 16 lanes; masks have registers of their own.
    Avx512,
    /// 8 lanes; a mask is a vector of zeros and ones.
    Avx2,
}

impl Target {
    /// Lanes of 32 bits in a vector.
    pub fn lanes(self) -> usize {
        match self {
            Target::Avx512 => 16,
            Target::Avx2 => 8,
        }
    }
}

/// How an element lies in memory and what it becomes in a lane.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Form {
    /// 32 bits as they are.
    Word,
    /// f16, to f32 and back.
    Half,
    /// The upper half of a lane.
    Brain,
    /// Sixteen bits, without and with sign.
    U16,
    I16,
    /// Eight bits, without and with sign.
    U8,
    I8,
    /// A byte that is 0 or 1, and a mask.
    Bool,
}

impl Form {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Form::Word => 4,
            Form::Half | Form::Brain | Form::U16 | Form::I16 => 2,
            Form::U8 | Form::I8 | Form::Bool => 1,
        }
    }
}

/// A lane operation. Operands are lanes of 32 bits unless it says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum LaneOp {
    /// The same bits in every lane.
    Const(u32),
    /// An operand in memory, one element for all lanes.
    Splat(u32, Form),
    /// An operand in memory, an element for each lane.
    Load(u32, Form),
    /// What a fold has so far.
    Sum(u32),
    Add,
    Sub,
    Mul,
    Div,
    /// a / b for a b that is the same for every element; c is 1 / b, or NaN if that is of no use. Not on AVX2.
    Over,
    /// a b + c, and c - a b, with one rounding.
    Fma,
    Fnma,
    Sqrt,
    /// `a < b ? a : b`, and the same for `>`.
    Min,
    Max,
    /// The smaller and the larger, -0 below +0; a number beside NaN is one of the two. Not on AVX2.
    Lower,
    Upper,
    /// To an integer: 0 nearest even, 1 down, 2 up, 3 toward 0.
    Round(u32),
    /// From i32, and to it where it fits.
    ToFloat,
    ToInt,
    /// Rounded to f16 and back.
    Half,
    And,
    Or,
    Xor,
    /// i32.
    AddInt,
    SubInt,
    MulInt,
    MinInt,
    MaxInt,
    AbsInt,
    Shl(u32),
    Shr(u32),
    Sar(u32),
    /// Bits of the second operand where the first has ones, of the third elsewhere. Not on AVX2.
    Merge,
    /// A mask: f32 compared, by the instruction's predicate.
    Compare(u32),
    /// A mask: i32 compared. On AVX2 only [`EQUAL`] and [`GREATER`].
    CompareInt(u32),
    /// Masks of masks. On AVX2 they are [`LaneOp::And`] and so on.
    Both,
    Either,
    Differ,
    Not,
    /// By a mask: the second operand or the third.
    Pick,
    /// By a mask: the second operand or 0.
    Keep,
}

/// Predicates of i32 comparison.
pub(super) const EQUAL: u32 = 0;
pub(super) const LESS: u32 = 1;
pub(super) const LESS_EQUAL: u32 = 2;
pub(super) const NOT_EQUAL: u32 = 4;
pub(super) const GREATER_EQUAL: u32 = 5;
pub(super) const GREATER: u32 = 6;

/// Predicates of f32 comparison. All but [`UNEQUAL`] and [`UNORDERED`] are false for NaN.
pub(super) const SAME: u32 = 0;
pub(super) const BELOW: u32 = 1;
pub(super) const AT_MOST: u32 = 2;
pub(super) const UNORDERED: u32 = 3;
pub(super) const UNEQUAL: u32 = 4;
/// Not at most, and not above: true for NaN.
pub(super) const NOT_AT_MOST: u32 = 6;
pub(super) const NOT_ABOVE: u32 = 10;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Node {
    pub lane: LaneOp,
    pub args: [u32; 3],
}

impl Node {
    /// The values it takes.
    pub fn args(&self) -> &[u32] {
        &self.args[..self.lane.arity()]
    }
}

impl LaneOp {
    pub fn arity(self) -> usize {
        match self {
            LaneOp::Const(_) | LaneOp::Splat(..) | LaneOp::Load(..) | LaneOp::Sum(_) => 0,
            LaneOp::Sqrt | LaneOp::Round(_) | LaneOp::ToFloat | LaneOp::ToInt | LaneOp::Half => 1,
            LaneOp::AbsInt | LaneOp::Shl(_) | LaneOp::Shr(_) | LaneOp::Sar(_) | LaneOp::Not => 1,
            LaneOp::Add | LaneOp::Sub | LaneOp::Mul | LaneOp::Div | LaneOp::Min | LaneOp::Max => 2,
            LaneOp::Lower | LaneOp::Upper => 2,
            LaneOp::And | LaneOp::Or | LaneOp::Xor | LaneOp::AddInt | LaneOp::SubInt | LaneOp::MulInt => 2,
            LaneOp::MinInt | LaneOp::MaxInt | LaneOp::Compare(_) | LaneOp::CompareInt(_) => 2,
            LaneOp::Both | LaneOp::Either | LaneOp::Differ | LaneOp::Keep => 2,
            LaneOp::Over | LaneOp::Fma | LaneOp::Fnma | LaneOp::Merge | LaneOp::Pick => 3,
        }
    }

    /// Whether its operands may change places.
    pub fn commutes(self) -> bool {
        use LaneOp::*;
        matches!(
            self,
            Add | Mul | And | Or | Xor | AddInt | MulInt | MinInt | MaxInt | Both | Either | Differ
        )
    }

    /// Whether its value is a mask, on AVX-512.
    pub fn is_mask(self) -> bool {
        use LaneOp::*;
        let loaded = matches!(self, Load(_, Form::Bool) | Splat(_, Form::Bool));
        loaded || matches!(self, Compare(_) | CompareInt(_) | Both | Either | Differ | Not)
    }
}

pub(super) struct Graph {
    pub target: Target,
    pub nodes: Vec<Node>,
    /// Which nodes are the same for every element.
    pub fixed: Vec<bool>,
    known: FxHashMap<Node, u32>,
    /// Something was asked for that has no lane operation.
    pub missing: bool,
}

impl Graph {
    pub fn new(target: Target) -> Graph {
        Graph { target, nodes: Vec::new(), fixed: Vec::new(), known: FxHashMap::default(), missing: false }
    }

    /// The node that does this, an earlier one if there is one.
    pub fn node(&mut self, lane: LaneOp, args: &[u32]) -> u32 {
        let mut all = [0; 3];
        all[..args.len()].copy_from_slice(args);
        if lane.commutes() && all[0] > all[1] {
            all.swap(0, 1);
        }
        let node = Node { lane, args: all };
        *self.known.entry(node).or_insert_with(|| {
            self.fixed.push(match lane {
                LaneOp::Const(_) | LaneOp::Splat(..) => true,
                LaneOp::Load(..) | LaneOp::Sum(_) => false,
                _ => node.args().iter().all(|&a| self.fixed[a as usize]),
            });
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        })
    }

    pub fn at(&self, node: u32) -> Node {
        self.nodes[node as usize]
    }
}
