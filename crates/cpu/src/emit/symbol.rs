//! Numbers that are not computed but written down: what the tables' value column and the polynomials make of these is
//! the graph of an operation. A function that has no form here is noted as missing; its pass is then interpreted.

use super::graph::{self, Graph, LaneOp, Target};
use kiln_ir::math::{Bits, Compare, DivideError, Double, Float, Num, Single, Word, single};
use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Sub};

thread_local! {
    /// What this thread is writing. Constants of the traits need a graph from nowhere.
    static GRAPH: RefCell<Graph> = RefCell::new(Graph::new(Target::Avx512));
}

/// Writes a graph by `f`.
pub(super) fn write<R>(target: Target, f: impl FnOnce() -> R) -> (Graph, R) {
    let outer = GRAPH.replace(Graph::new(target));
    let result = f();
    (GRAPH.replace(outer), result)
}

/// A node, or a number that becomes one where it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Value {
    Lit(u32),
    Node(u32),
}

impl Value {
    pub fn node(self) -> u32 {
        match self {
            Value::Lit(bits) => GRAPH.with_borrow_mut(|g| g.node(LaneOp::Const(bits), &[])),
            Value::Node(node) => node,
        }
    }

    /// Its bits, if they are known.
    fn known(self) -> Option<u32> {
        match self {
            Value::Lit(bits) => Some(bits),
            Value::Node(node) => GRAPH.with_borrow(|g| match g.at(node).lane {
                LaneOp::Const(bits) => Some(bits),
                _ => None,
            }),
        }
    }

    /// What it was made by.
    fn made(self) -> Option<graph::Node> {
        match self {
            Value::Lit(_) => None,
            Value::Node(node) => Some(GRAPH.with_borrow(|g| g.at(node))),
        }
    }
}

/// A new value.
pub(super) fn make(lane: LaneOp, args: &[Value]) -> Value {
    let mut nodes = [0; 3];
    for (node, arg) in nodes.iter_mut().zip(args) {
        *node = arg.node();
    }
    Value::Node(GRAPH.with_borrow_mut(|g| g.node(lane, &nodes[..args.len()])))
}

fn target() -> Target {
    GRAPH.with_borrow(|g| g.target)
}

fn missing() -> Value {
    GRAPH.with_borrow_mut(|g| g.missing = true);
    Value::Lit(0)
}

/// f32.
#[derive(Clone, Copy)]
pub(super) struct Real(pub Value);
/// i32.
#[derive(Clone, Copy)]
pub(super) struct Whole(pub Value);
/// A truth: a mask on AVX-512, all ones or none on AVX2.
#[derive(Clone, Copy)]
pub(super) struct Truth(pub Value);

const SIGN: u32 = 0x8000_0000;

fn compare(predicate: u32, a: Real, b: Real) -> Truth {
    Truth(make(LaneOp::Compare(predicate), &[a.0, b.0]))
}

fn compare_ints(predicate: u32, a: Whole, b: Whole) -> Truth {
    Truth(make(LaneOp::CompareInt(predicate), &[a.0, b.0]))
}

/// `a` where that is true, else `b`, whatever the lanes hold.
pub(super) fn pick(truth: Truth, a: Value, b: Value) -> Value {
    if a == b {
        return a;
    }
    let between = truth.0.made().filter(|made| made.lane == LaneOp::Compare(graph::BELOW));
    if let Some([p, q, _]) = between.map(|made| made.args) {
        // p < q ? p : q is what the instruction does, whatever the operands are.
        match (a.node(), b.node()) {
            (a, b) if (a, b) == (p, q) => return make(LaneOp::Min, &[Value::Node(p), Value::Node(q)]),
            (a, b) if (a, b) == (q, p) => return make(LaneOp::Max, &[Value::Node(q), Value::Node(p)]),
            _ => {}
        }
    }
    match b.known() {
        Some(0) => make(LaneOp::Keep, &[truth.0, a]),
        _ => make(LaneOp::Pick, &[truth.0, a, b]),
    }
}

/// f32 rounded to bf16 and widened again; a NaN stays one.
pub(super) fn brain(x: Real) -> Real {
    let bits = x.to_word();
    let odd = bits.shr(16).and(Word::lit(1));
    let rounded = bits.add(Word::lit(0x7fff)).add(odd);
    let quiet = bits.or(Word::lit(0x40_0000));
    let bits = Whole(pick(x.nan(), quiet.0, rounded.0)).and(Word::lit(0xffff_0000));
    Real(bits.0)
}

/// f32 to i32 as Rust converts: toward 0, to the nearest that there is, NaN to 0.
pub(super) fn to_int(x: Real) -> Whole {
    let y = make(LaneOp::ToInt, &[x.0]);
    // What does not fit becomes the smallest.
    let large = Value::Lit(2_147_483_648f32.to_bits());
    let y = pick(compare(graph::AT_MOST, Real(large), x), Value::Lit(i32::MAX as u32), y);
    Whole(pick(compare(graph::SAME, x, x), y, Value::Lit(0)))
}

macro_rules! binary {
    ($($name:ident $lane:ident)*) => {
        $(fn $name(self, o: Self) -> Self { Self(make(LaneOp::$lane, &[self.0, o.0])) })*
    };
}

macro_rules! absent {
    ($($name:ident)*; $($name2:ident)*) => {
        $(fn $name(self) -> Self { Self(missing()) })*
        $(fn $name2(self, _: Self) -> Self { Self(missing()) })*
    };
}

impl Compare for Real {
    type Truth = Truth;
    fn equals(self, o: Real) -> Truth {
        compare(graph::SAME, self, o)
    }
    fn differs(self, o: Real) -> Truth {
        compare(graph::UNEQUAL, self, o)
    }
    fn below(self, o: Real) -> Truth {
        compare(graph::BELOW, self, o)
    }
    fn at_most(self, o: Real) -> Truth {
        compare(graph::AT_MOST, self, o)
    }
    fn above(self, o: Real) -> Truth {
        compare(graph::BELOW, o, self)
    }
    fn at_least(self, o: Real) -> Truth {
        compare(graph::AT_MOST, o, self)
    }
}

impl Num for Real {
    const ZERO: Real = Real(Value::Lit(0));
    const ONE: Real = Real(Value::Lit(0x3f80_0000));
    binary!(add Add sub Sub mul Mul);
    absent!(; floor_divide remainder fmod pow);

    fn neg(self) -> Real {
        Real(make(LaneOp::Xor, &[self.0, Value::Lit(SIGN)]))
    }
    fn abs(self) -> Real {
        Real(make(LaneOp::And, &[self.0, Value::Lit(!SIGN)]))
    }
    fn sign(self) -> Real {
        let below = Real::pick(self.below(Real::ZERO), Real(Value::Lit((-1f32).to_bits())), Real::ZERO);
        Real::pick(self.above(Real::ZERO), Real::ONE, below)
    }
    fn maximum(self, o: Real) -> Real {
        extreme(self, o, LaneOp::Max, LaneOp::And, graph::NOT_AT_MOST)
    }
    fn minimum(self, o: Real) -> Real {
        extreme(self, o, LaneOp::Min, LaneOp::Or, graph::NOT_ABOVE)
    }
    fn nan(self) -> Truth {
        compare(graph::UNORDERED, self, self)
    }
    fn inf(self) -> Truth {
        self.abs().equals(Real::lit(f32::INFINITY))
    }
    fn divides(self, _: Real) -> Result<(), DivideError> {
        Ok(())
    }
}

/// The larger or smaller by `lane`; `tie` joins the bits of two zeros, and `wins` says where x is the answer beside 0.
fn extreme(a: Real, b: Real, lane: LaneOp, tie: LaneOp, wins: u32) -> Real {
    let (x, known) = match (a.0.known(), b.0.known()) {
        (_, Some(bits)) => (a, Some(bits)),
        (Some(bits), _) => (b, Some(bits)),
        _ => (a, None),
    };
    match known {
        Some(0) => return Real(pick(compare(wins, x, Real::ZERO), x.0, Value::Lit(0))),
        // The second operand is the result where one is NaN, and no zeros meet.
        Some(bits) if bits != SIGN && !f32::from_bits(bits).is_nan() => {
            return Real(make(lane, &[Value::Lit(bits), x.0]));
        }
        _ => {}
    }
    let both = match (target(), lane) {
        (Target::Avx512, LaneOp::Min) => make(LaneOp::Lower, &[a.0, b.0]),
        (Target::Avx512, _) => make(LaneOp::Upper, &[a.0, b.0]),
        // Of two zeros the instruction gives the second.
        (Target::Avx2, _) => make(tie, &[make(lane, &[a.0, b.0]), make(lane, &[b.0, a.0])]),
    };
    Real(pick(compare(graph::UNORDERED, a, b), (a + b).0, both))
}

impl Float for Real {
    absent!(sin cos tan asin acos atan sinh cosh asinh acosh atanh; atan2);

    fn of(x: f64) -> Real {
        Real::lit(x as f32)
    }
    fn div(self, by: Real) -> Real {
        let fixed = |x: Real| {
            let node = x.0.node();
            GRAPH.with_borrow(|g| g.fixed[node as usize])
        };
        if target() == Target::Avx2 || fixed(self) || !fixed(by) {
            return Real(make(LaneOp::Div, &[self.0, by.0]));
        }
        // What the body's way to divide by it is good for.
        let [least, most] = [-20, 20].map(|e| Real::lit(2f32.powi(e)));
        let size = by.abs();
        let fair = compare(graph::AT_MOST, least, size).and(compare(graph::AT_MOST, size, most));
        let inverse = pick(fair, make(LaneOp::Div, &[Real::ONE.0, by.0]), Real::lit(f32::NAN).0);
        Real(make(LaneOp::Over, &[self.0, by.0, inverse]))
    }
    fn exp(self) -> Real {
        single::exp(self)
    }
    fn exp_m1(self) -> Real {
        single::expm1(self)
    }
    fn ln(self) -> Real {
        single::log(self)
    }
    fn ln_1p(self) -> Real {
        single::log1p(self)
    }
    fn log2(self) -> Real {
        single::log2(self)
    }
    fn tanh(self) -> Real {
        single::tanh(self)
    }
    fn erf(self) -> Real {
        single::erf(self)
    }
    fn sqrt(self) -> Real {
        Real(make(LaneOp::Sqrt, &[self.0]))
    }
    fn round_even(self) -> Real {
        Real(make(LaneOp::Round(0), &[self.0]))
    }
    fn floor(self) -> Real {
        Real(make(LaneOp::Round(1), &[self.0]))
    }
    fn ceil(self) -> Real {
        Real(make(LaneOp::Round(2), &[self.0]))
    }
    fn trunc(self) -> Real {
        Real(make(LaneOp::Round(3), &[self.0]))
    }
    fn fma(self, a: Real, b: Real) -> Real {
        let sign = Value::Lit(SIGN).node();
        let negated = self.0.made().filter(|made| made.lane == LaneOp::Xor && made.args[..2].contains(&sign));
        Real(match negated {
            Some(made) => {
                let plain = if made.args[0] == sign { made.args[1] } else { made.args[0] };
                make(LaneOp::Fnma, &[Value::Node(plain), a.0, b.0])
            }
            None => make(LaneOp::Fma, &[self.0, a.0, b.0]),
        })
    }
    fn pick(truth: Truth, a: Real, b: Real) -> Real {
        Real(pick(truth, a.0, b.0))
    }
    fn copysign(self, sign: Real) -> Real {
        let kept = Value::Lit(!SIGN);
        Real(match target() {
            Target::Avx512 => make(LaneOp::Merge, &[kept, self.0, sign.0]),
            Target::Avx2 => make(
                LaneOp::Or,
                &[make(LaneOp::And, &[self.0, kept]), make(LaneOp::And, &[sign.0, Value::Lit(SIGN)])],
            ),
        })
    }
}

impl Single for Real {
    type Word = Whole;
    type Double = Absent;
    fn lit(x: f32) -> Real {
        Real(Value::Lit(x.to_bits()))
    }
    fn to_word(self) -> Whole {
        Whole(self.0)
    }
    fn from_word(bits: Whole) -> Real {
        Real(bits.0)
    }
    fn of_signed(x: Whole) -> Real {
        Real(make(LaneOp::ToFloat, &[x.0]))
    }
    fn widen(self) -> Absent {
        Absent::new()
    }
}

macro_rules! operators {
    ($($trait:ident $name:ident)*) => {$(
        impl $trait for Real {
            type Output = Real;
            fn $name(self, o: Real) -> Real { Real(make(LaneOp::$trait, &[self.0, o.0])) }
        }
    )*};
}
operators!(Add add Sub sub Mul mul Div div);

/// f64 has no lanes here.
#[derive(Clone, Copy)]
pub(super) struct Absent(());

impl Absent {
    fn new() -> Absent {
        missing();
        Absent(())
    }
}

macro_rules! absent_operators {
    ($($trait:ident $name:ident)*) => {$(
        impl $trait for Absent {
            type Output = Absent;
            fn $name(self, _: Absent) -> Absent { self }
        }
    )*};
}
absent_operators!(Add add Sub sub Mul mul);

impl Double for Absent {
    type Truth = Truth;
    type Single = Real;
    fn lit(_: f64) -> Absent {
        Absent::new()
    }
    fn narrow(self) -> Real {
        Real(missing())
    }
    fn fused(self, _: Absent, _: Absent) -> Absent {
        self
    }
    fn same(self, _: Absent) -> Truth {
        Truth(missing())
    }
    fn less(self, _: Absent) -> Truth {
        Truth(missing())
    }
    fn choose(_: Truth, a: Absent, _: Absent) -> Absent {
        a
    }
    fn power(self) -> Absent {
        self
    }
    fn is_odd(self) -> Truth {
        Truth(missing())
    }
}

/// AVX2 has two of the comparisons.
impl Compare for Whole {
    type Truth = Truth;
    fn equals(self, o: Whole) -> Truth {
        compare_ints(graph::EQUAL, self, o)
    }
    fn differs(self, o: Whole) -> Truth {
        match target() {
            Target::Avx512 => compare_ints(graph::NOT_EQUAL, self, o),
            Target::Avx2 => self.equals(o).not(),
        }
    }
    fn below(self, o: Whole) -> Truth {
        match target() {
            Target::Avx512 => compare_ints(graph::LESS, self, o),
            Target::Avx2 => o.above(self),
        }
    }
    fn at_most(self, o: Whole) -> Truth {
        match target() {
            Target::Avx512 => compare_ints(graph::LESS_EQUAL, self, o),
            Target::Avx2 => self.above(o).not(),
        }
    }
    fn above(self, o: Whole) -> Truth {
        compare_ints(graph::GREATER, self, o)
    }
    fn at_least(self, o: Whole) -> Truth {
        match target() {
            Target::Avx512 => compare_ints(graph::GREATER_EQUAL, self, o),
            Target::Avx2 => o.above(self).not(),
        }
    }
}

impl Num for Whole {
    const ZERO: Whole = Whole(Value::Lit(0));
    const ONE: Whole = Whole(Value::Lit(1));
    binary!(add AddInt sub SubInt mul MulInt maximum MaxInt minimum MinInt);
    absent!(; floor_divide remainder fmod pow);

    fn neg(self) -> Whole {
        Whole::ZERO.sub(self)
    }
    fn abs(self) -> Whole {
        Whole(make(LaneOp::AbsInt, &[self.0]))
    }
    fn sign(self) -> Whole {
        self.maximum(Word::lit(-1i32 as u32)).minimum(Whole::ONE)
    }
    fn nan(self) -> Truth {
        falsehood()
    }
    fn inf(self) -> Truth {
        falsehood()
    }
    fn divides(self, _: Whole) -> Result<(), DivideError> {
        Ok(())
    }
}

/// False in every lane.
fn falsehood() -> Truth {
    Truth(make(LaneOp::CompareInt(graph::EQUAL), &[Value::Lit(0), Value::Lit(1)]))
}

impl Bits for Whole {
    binary!(and And or Or xor Xor);
    fn not(self) -> Whole {
        self.xor(Word::lit(!0))
    }
}

impl Word for Whole {
    fn lit(x: u32) -> Whole {
        Whole(Value::Lit(x))
    }
    fn shl(self, by: u32) -> Whole {
        Whole(make(LaneOp::Shl(by), &[self.0]))
    }
    fn shr(self, by: u32) -> Whole {
        Whole(make(LaneOp::Shr(by), &[self.0]))
    }
    fn sar(self, by: u32) -> Whole {
        Whole(make(LaneOp::Sar(by), &[self.0]))
    }
    fn is_even(self) -> Truth {
        Truth(make(LaneOp::CompareInt(graph::EQUAL), &[self.and(Whole::ONE).0, Value::Lit(0)]))
    }
}

/// As 0 and 1.
impl Compare for Truth {
    type Truth = Truth;
    fn equals(self, o: Truth) -> Truth {
        self.xor(o).not()
    }
    fn differs(self, o: Truth) -> Truth {
        self.xor(o)
    }
    fn below(self, o: Truth) -> Truth {
        self.not().and(o)
    }
    fn at_most(self, o: Truth) -> Truth {
        self.not().or(o)
    }
    fn above(self, o: Truth) -> Truth {
        self.and(o.not())
    }
    fn at_least(self, o: Truth) -> Truth {
        self.or(o.not())
    }
}

impl Bits for Truth {
    fn and(self, o: Truth) -> Truth {
        Truth(make(by_target(LaneOp::Both, LaneOp::And), &[self.0, o.0]))
    }
    fn or(self, o: Truth) -> Truth {
        Truth(make(by_target(LaneOp::Either, LaneOp::Or), &[self.0, o.0]))
    }
    fn xor(self, o: Truth) -> Truth {
        Truth(make(by_target(LaneOp::Differ, LaneOp::Xor), &[self.0, o.0]))
    }
    fn not(self) -> Truth {
        Truth(match target() {
            Target::Avx512 => make(LaneOp::Not, &[self.0]),
            Target::Avx2 => make(LaneOp::Xor, &[self.0, Value::Lit(!0)]),
        })
    }
}

fn by_target(avx512: LaneOp, avx2: LaneOp) -> LaneOp {
    match target() {
        Target::Avx512 => avx512,
        Target::Avx2 => avx2,
    }
}
