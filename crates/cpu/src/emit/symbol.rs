//! Numbers that are not computed but written down: what the tables' value column and the polynomials make of these is
//! the graph of an operation. A function that has no form here is noted as missing; its pass is then interpreted.

use super::graph::{self, Graph, Lane, Target};
use kiln_ir::math::{Bits, DivideError, Float, Num, Single, Word, single};
use kiln_ir::{Binary, Unary};
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
            Value::Lit(bits) => GRAPH.with_borrow_mut(|g| g.node(Lane::Const(bits), &[])),
            Value::Node(node) => node,
        }
    }

    /// Its bits, if they are known.
    fn known(self) -> Option<u32> {
        match self {
            Value::Lit(bits) => Some(bits),
            Value::Node(node) => GRAPH.with_borrow(|g| match g.at(node).lane {
                Lane::Const(bits) => Some(bits),
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
pub(super) fn make(lane: Lane, args: &[Value]) -> Value {
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
    Truth(make(Lane::Compare(predicate), &[a.0, b.0]))
}

/// Two f32 compared as the tables name it.
pub(super) fn compared(op: Binary, a: Real, b: Real) -> Option<Truth> {
    Some(match op {
        Binary::Eq => compare(graph::SAME, a, b),
        Binary::Ne => compare(graph::UNEQUAL, a, b),
        Binary::Lt => compare(graph::BELOW, a, b),
        Binary::Le => compare(graph::AT_MOST, a, b),
        Binary::Gt => compare(graph::BELOW, b, a),
        Binary::Ge => compare(graph::AT_MOST, b, a),
        _ => return None,
    })
}

/// Two i32 compared.
pub(super) fn compared_ints(op: Binary, a: Whole, b: Whole) -> Option<Truth> {
    let make = |predicate, a: Whole, b: Whole| Truth(make(Lane::CompareInt(predicate), &[a.0, b.0]));
    Some(match (op, target()) {
        (Binary::Eq, _) => make(graph::EQUAL, a, b),
        (Binary::Gt, _) => make(graph::GREATER, a, b),
        (Binary::Lt, Target::Avx512) => make(graph::LESS, a, b),
        (Binary::Le, Target::Avx512) => make(graph::LESS_EQUAL, a, b),
        (Binary::Ge, Target::Avx512) => make(graph::GREATER_EQUAL, a, b),
        (Binary::Ne, Target::Avx512) => make(graph::NOT_EQUAL, a, b),
        (Binary::Lt, Target::Avx2) => make(graph::GREATER, b, a),
        (Binary::Le, Target::Avx2) => make(graph::GREATER, a, b).not(),
        (Binary::Ge, Target::Avx2) => make(graph::GREATER, b, a).not(),
        (Binary::Ne, Target::Avx2) => make(graph::EQUAL, a, b).not(),
        _ => return None,
    })
}

/// Two truths compared as 0 and 1.
pub(super) fn compared_truths(op: Binary, a: Truth, b: Truth) -> Option<Truth> {
    Some(match op {
        Binary::Eq => a.xor(b).not(),
        Binary::Ne => a.xor(b),
        Binary::Lt => a.not().and(b),
        Binary::Le => a.not().or(b),
        Binary::Gt => a.and(b.not()),
        Binary::Ge => a.or(b.not()),
        _ => return None,
    })
}

/// `a` where that is true, else `b`, whatever the lanes hold.
pub(super) fn pick(truth: Truth, a: Value, b: Value) -> Value {
    if a == b {
        return a;
    }
    let between = truth.0.made().filter(|made| made.lane == Lane::Compare(graph::BELOW));
    if let Some([p, q, _]) = between.map(|made| made.args) {
        // p < q ? p : q is what the instruction does, whatever the operands are.
        match (a.node(), b.node()) {
            (a, b) if (a, b) == (p, q) => return make(Lane::Min, &[Value::Node(p), Value::Node(q)]),
            (a, b) if (a, b) == (q, p) => return make(Lane::Max, &[Value::Node(q), Value::Node(p)]),
            _ => {}
        }
    }
    match b.known() {
        Some(0) => make(Lane::Keep, &[truth.0, a]),
        _ => make(Lane::Pick, &[truth.0, a, b]),
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
    let y = make(Lane::ToInt, &[x.0]);
    // What does not fit becomes the smallest.
    let large = Value::Lit(2_147_483_648f32.to_bits());
    let y = pick(compare(graph::AT_MOST, Real(large), x), Value::Lit(i32::MAX as u32), y);
    Whole(pick(compare(graph::SAME, x, x), y, Value::Lit(0)))
}

macro_rules! binary {
    ($($name:ident $lane:ident)*) => {
        $(fn $name(self, o: Self) -> Self { Self(make(Lane::$lane, &[self.0, o.0])) })*
    };
}

macro_rules! absent {
    ($($name:ident)*; $($name2:ident)*) => {
        $(fn $name(self) -> Self { Self(missing()) })*
        $(fn $name2(self, _: Self) -> Self { Self(missing()) })*
    };
}

impl Num for Real {
    type Truth = Truth;
    const ZERO: Real = Real(Value::Lit(0));
    const ONE: Real = Real(Value::Lit(0x3f80_0000));
    binary!(add Add sub Sub mul Mul);
    absent!(; floor_divide remainder fmod pow);

    fn neg(self) -> Real {
        Real(make(Lane::Xor, &[self.0, Value::Lit(SIGN)]))
    }
    fn abs(self) -> Real {
        Real(make(Lane::And, &[self.0, Value::Lit(!SIGN)]))
    }
    fn sign(self) -> Real {
        let below = Real::pick(self.below(Real::ZERO), Real(Value::Lit((-1f32).to_bits())), Real::ZERO);
        Real::pick(self.above(Real::ZERO), Real::ONE, below)
    }
    fn maximum(self, o: Real) -> Real {
        extreme(self, o, Lane::Max, Lane::And, graph::NOT_AT_MOST)
    }
    fn minimum(self, o: Real) -> Real {
        extreme(self, o, Lane::Min, Lane::Or, graph::NOT_ABOVE)
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
fn extreme(a: Real, b: Real, lane: Lane, tie: Lane, wins: u32) -> Real {
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
        (Target::Avx512, Lane::Min) => make(Lane::Lower, &[a.0, b.0]),
        (Target::Avx512, _) => make(Lane::Upper, &[a.0, b.0]),
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
            return Real(make(Lane::Div, &[self.0, by.0]));
        }
        // What the body's way to divide by it is good for.
        let [least, most] = [-20, 20].map(|e| Real::lit(2f32.powi(e)));
        let size = by.abs();
        let fair = compare(graph::AT_MOST, least, size).and(compare(graph::AT_MOST, size, most));
        let inverse = pick(fair, make(Lane::Div, &[Real::ONE.0, by.0]), Real::lit(f32::NAN).0);
        Real(make(Lane::Over, &[self.0, by.0, inverse]))
    }
    fn to(self) -> f64 {
        missing();
        0.0
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
        Real(make(Lane::Sqrt, &[self.0]))
    }
    fn round_even(self) -> Real {
        Real(make(Lane::Round(0), &[self.0]))
    }
    fn floor(self) -> Real {
        Real(make(Lane::Round(1), &[self.0]))
    }
    fn ceil(self) -> Real {
        Real(make(Lane::Round(2), &[self.0]))
    }
    fn trunc(self) -> Real {
        Real(make(Lane::Round(3), &[self.0]))
    }
    fn fma(self, a: Real, b: Real) -> Real {
        let sign = Value::Lit(SIGN).node();
        let negated = self.0.made().filter(|made| made.lane == Lane::Xor && made.args[..2].contains(&sign));
        Real(match negated {
            Some(made) => {
                let plain = if made.args[0] == sign { made.args[1] } else { made.args[0] };
                make(Lane::Fnma, &[Value::Node(plain), a.0, b.0])
            }
            None => make(Lane::Fma, &[self.0, a.0, b.0]),
        })
    }
    fn below(self, o: Real) -> Truth {
        compare(graph::BELOW, self, o)
    }
    fn above(self, o: Real) -> Truth {
        compare(graph::BELOW, o, self)
    }
    fn equals(self, o: Real) -> Truth {
        compare(graph::SAME, self, o)
    }
    fn pick(truth: Truth, a: Real, b: Real) -> Real {
        Real(pick(truth, a.0, b.0))
    }
}

impl Single for Real {
    type Word = Whole;
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
        Real(make(Lane::ToFloat, &[x.0]))
    }
    fn copysign(self, sign: Real) -> Real {
        let kept = Value::Lit(!SIGN);
        Real(match target() {
            Target::Avx512 => make(Lane::Merge, &[kept, self.0, sign.0]),
            Target::Avx2 => make(
                Lane::Or,
                &[make(Lane::And, &[self.0, kept]), make(Lane::And, &[sign.0, Value::Lit(SIGN)])],
            ),
        })
    }
}

macro_rules! operators {
    ($($trait:ident $name:ident)*) => {$(
        impl $trait for Real {
            type Output = Real;
            fn $name(self, o: Real) -> Real { Real(make(Lane::$trait, &[self.0, o.0])) }
        }
    )*};
}
operators!(Add add Sub sub Mul mul Div div);

impl Num for Whole {
    type Truth = Truth;
    const ZERO: Whole = Whole(Value::Lit(0));
    const ONE: Whole = Whole(Value::Lit(1));
    binary!(add AddInt sub SubInt mul MulInt maximum MaxInt minimum MinInt);
    absent!(; floor_divide remainder fmod pow);

    fn neg(self) -> Whole {
        Whole::ZERO.sub(self)
    }
    fn abs(self) -> Whole {
        Whole(make(Lane::AbsInt, &[self.0]))
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
    Truth(make(Lane::CompareInt(graph::EQUAL), &[Value::Lit(0), Value::Lit(1)]))
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
        Whole(make(Lane::Shl(by), &[self.0]))
    }
    fn shr(self, by: u32) -> Whole {
        Whole(make(Lane::Shr(by), &[self.0]))
    }
    fn sar(self, by: u32) -> Whole {
        Whole(make(Lane::Sar(by), &[self.0]))
    }
    fn is_even(self) -> Truth {
        Truth(make(Lane::CompareInt(graph::EQUAL), &[self.and(Whole::ONE).0, Value::Lit(0)]))
    }
}

impl Bits for Truth {
    fn and(self, o: Truth) -> Truth {
        Truth(make(by_target(Lane::Both, Lane::And), &[self.0, o.0]))
    }
    fn or(self, o: Truth) -> Truth {
        Truth(make(by_target(Lane::Either, Lane::Or), &[self.0, o.0]))
    }
    fn xor(self, o: Truth) -> Truth {
        Truth(make(by_target(Lane::Differ, Lane::Xor), &[self.0, o.0]))
    }
    fn not(self) -> Truth {
        Truth(match target() {
            Target::Avx512 => make(Lane::Not, &[self.0]),
            Target::Avx2 => make(Lane::Xor, &[self.0, Value::Lit(!0)]),
        })
    }
}

fn by_target(avx512: Lane, avx2: Lane) -> Lane {
    match target() {
        Target::Avx512 => avx512,
        Target::Avx2 => avx2,
    }
}

/// The value where the operation is of the wanted domain, else nothing.
macro_rules! in_domain {
    (Float Float $value:expr) => {
        Some($value)
    };
    (Num Num $value:expr) => {
        Some($value)
    };
    (Bits Bits $value:expr) => {
        Some($value)
    };
    (Test Test $value:expr) => {
        Some($value)
    };
    ($want:ident $domain:ident $value:expr) => {
        None
    };
}

macro_rules! unary_forms {
    ($($variant:ident $name:ident $doc:literal { domain: $domain:ident, value: |$x:ident| $value:expr, $($more:tt)* })*) => {
        /// The value of an operation on floats.
        #[allow(unused_variables)]
        pub(super) fn unary_float<T: Float>(op: Unary, x: T) -> Option<T> {
            match op { $(Unary::$variant => { let $x = x; in_domain!(Float $domain $value) })* }
        }
        /// The value of an operation on numbers.
        #[allow(unused_variables)]
        pub(super) fn unary_num<T: Num>(op: Unary, x: T) -> Option<T> {
            match op { $(Unary::$variant => { let $x = x; in_domain!(Num $domain $value) })* }
        }
        /// The answer to a question about a number.
        #[allow(unused_variables)]
        pub(super) fn unary_test<T: Num>(op: Unary, x: T) -> Option<T::Truth> {
            match op { $(Unary::$variant => { let $x = x; in_domain!(Test $domain $value) })* }
        }
        /// The value of an operation on bits.
        #[allow(unused_variables)]
        pub(super) fn unary_bits<T: Bits>(op: Unary, x: T) -> Option<T> {
            match op { $(Unary::$variant => { let $x = x; in_domain!(Bits $domain $value) })* }
        }
    };
}
kiln_ir::unary_table!(unary_forms);

macro_rules! binary_forms {
    ($($variant:ident $name:ident $doc:literal { domain: $domain:ident, value: |$a:ident, $b:ident| $value:expr, $($more:tt)* })*) => {
        /// The value of an operation on floats.
        #[allow(unused_variables)]
        pub(super) fn binary_float<T: Float>(op: Binary, a: T, b: T) -> Option<T> {
            match op { $(Binary::$variant => { let ($a, $b) = (a, b); in_domain!(Float $domain $value) })* }
        }
        /// The value of an operation on numbers.
        #[allow(unused_variables)]
        pub(super) fn binary_num<T: Num>(op: Binary, a: T, b: T) -> Option<T> {
            match op { $(Binary::$variant => { let ($a, $b) = (a, b); in_domain!(Num $domain $value) })* }
        }
        /// The value of an operation on bits.
        #[allow(unused_variables)]
        pub(super) fn binary_bits<T: Bits>(op: Binary, a: T, b: T) -> Option<T> {
            match op { $(Binary::$variant => { let ($a, $b) = (a, b); in_domain!(Bits $domain $value) })* }
        }
    };
}
kiln_ir::binary_table!(binary_forms);
