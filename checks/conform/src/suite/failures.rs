//! Operations that fail on their operands' values: they poison what they would have given and what depends on it, say
//! why in fields, and leave everything else as it was.

use super::cases::axpy;
use super::{Problem, Suite, settled};
use kiln_cpu::reference::Value;
use kiln_device::Error;
use kiln_ir::math::DivideError;
use kiln_ir::*;

pub fn check(suite: &mut Suite<'_>) {
    for (op, ins, cause) in failing() {
        fails(suite, &op, ins, cause);
    }
    absent(suite);
    steps(suite);
}

/// Operations with operands that they fail on, and the root cause.
fn failing() -> Vec<(Op, Vec<Value>, Error)> {
    let x = || Value::new([3, 2], vec![1f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let at = |shape: [usize; 2], index: Vec<i64>| Value::new(shape, index);
    let index = |op: &str, index, length| Error::Index { op: op.into(), index, length };
    let divide = |op: &str, error| Error::Divide { op: op.into(), error };
    let mut out = vec![
        (
            Op::Gather { kind: GatherKind::Each, axis: 0 },
            vec![x(), at([1, 2], vec![0, 3])],
            index("gather", 3, 3),
        ),
        (
            Op::Gather { kind: GatherKind::Each, axis: 1 },
            vec![x(), at([1, 2], vec![-1, 0])],
            index("gather", -1, 2),
        ),
        (
            Op::Gather { kind: GatherKind::Take, axis: 0 },
            vec![x(), Value::new([2], vec![2u8, 255])],
            index("take", 255, 3),
        ),
        (
            Op::Gather { kind: GatherKind::Take, axis: 0 },
            vec![x(), Value::new([1], vec![u64::MAX])],
            index("take", i64::MAX, 3),
        ),
        (
            Op::Scatter { kind: ScatterKind::Each, axis: 0 },
            vec![x(), at([1, 2], vec![1, 7]), Value::new([1, 2], vec![0f32; 2])],
            index("scatter", 7, 3),
        ),
        (
            Op::Scatter { kind: ScatterKind::EachAdd, axis: 0 },
            vec![x(), at([1, 2], vec![i64::MIN, 0]), Value::new([1, 2], vec![0f32; 2])],
            index("scatter_add", i64::MIN, 3),
        ),
        (
            Op::Scatter { kind: ScatterKind::TakeAdd, axis: 1 },
            vec![x(), Value::new([1], vec![2i32]), Value::new([3, 1], vec![0f32; 3])],
            index("take_add", 2, 2),
        ),
        (
            Op::Binary(Binary::Add),
            vec![x(), Value::new([3], vec![0f32; 3])],
            Error::Op(OpError::ShapeMismatch { op: "add".into(), lhs: [3, 2].into(), rhs: [3].into() }),
        ),
    ];
    for op in Binary::ALL.iter().copied().filter(|op| op.divides()) {
        let (name, op) = (op.name(), Op::Binary(op));
        let zero = divide(name, DivideError::ByZero);
        out.push((
            op.clone(),
            vec![Value::new([3], vec![1i32, 2, 3]), Value::new([3], vec![1i32, 0, 1])],
            zero.clone(),
        ));
        out.push((op.clone(), vec![Value::new([2], vec![7u8, 8]), Value::new([], vec![0u8])], zero.clone()));
        // The first failing element is told, wherever work is cut.
        let n = 70_000;
        let last = |x: i64, y: i64| {
            Value::new([n], (0..n).map(|i| if i == n - 1 { y } else { x }).collect::<Vec<_>>())
        };
        out.push((op.clone(), vec![last(1, i64::MIN), last(2, 0)], zero));
        if op != Op::Binary(Binary::FloorDivide) {
            continue;
        }
        let overflow = divide(name, DivideError::Overflow);
        out.push((
            op.clone(),
            vec![Value::new([2], vec![i8::MIN, 1]), Value::new([2], vec![-1i8, 0])],
            overflow.clone(),
        ));
        out.push((op, vec![Value::new([1], vec![i64::MIN]), Value::new([1], vec![-1i64])], overflow));
    }
    let call = |message: &str| Error::Custom { op: super::cases::AXPY.into(), message: message.into() };
    let refused = Value::new([1], vec![i32::MIN]);
    out.push((axpy(2), vec![refused.clone(), refused], call("the smallest number is refused")));
    out
}

fn fails(suite: &mut Suite<'_>, op: &Op, ins: Vec<Value>, cause: Error) {
    suite.totals.cases += 1;
    let metas: Vec<Meta> = ins.iter().map(Value::meta).collect();
    if !suite.device.supports(op, &metas) {
        return;
    }
    let name = format!("failing {op} : {metas:?}");
    let start = settled(&*suite.device);
    let other = Value::new([4], vec![1i32, -2, 3, i32::MIN]);
    let names: Vec<Id> = ins.iter().map(|x| suite.write(x)).collect();
    let beside = suite.write(&other);
    let outs: Vec<Id> = (0..op.outputs()).map(|_| suite.fresh()).collect();
    let [after, further, fine] = [suite.fresh(), suite.fresh(), suite.fresh()];
    let run = |op: Op, ins: &[Id], out: Id| Item::Run(Node::new(op, ins, &[out]));
    suite.submit(vec![
        Item::Run(Node::new(op.clone(), &names, &outs)),
        run(Op::Move(Move::Reshape([1, 2, 3].into())), &outs[..1], after),
        run(Op::Binary(Binary::Mul), &[after, after], further),
        Item::Free(after),
        run(Op::Unary(Unary::Neg), &[beside], fine),
    ]);
    for &id in outs.iter().chain([&further]) {
        poisoned(suite, &name, op.name(), id, &cause);
    }
    for (id, x) in names.iter().zip(&ins).chain([(&beside, &other)]) {
        suite.compare(&|| name.clone(), "an operand", &Op::Select, *id, x);
    }
    let negated = Value::new([4], vec![-1i32, 2, -3, i32::MIN]);
    suite.compare(&|| name.clone(), "an unrelated result", &Op::Unary(Unary::Neg), fine, &negated);
    // A poisoned value poisons later batches too, and is freed like any other.
    let late = suite.fresh();
    suite.submit(vec![run(Op::Cast(DType::F32), &[further], late)]);
    poisoned(suite, &name, op.name(), late, &cause);
    suite.free(outs.into_iter().chain([further, fine, late, beside]).chain(names));
    suite.settles(&name, start);
}

/// A guard takes failures for facts, and what is not committed may have failed.
fn steps(suite: &mut Suite<'_>) {
    suite.totals.cases += 1;
    let old = Value::new([2], vec![1f32, 2.0]);
    if !suite.device.supports(&Op::Commit, &[Meta::new(DType::Bool, []), old.meta(), old.meta()]) {
        return;
    }
    let start = settled(&*suite.device);
    let (kept, index) = (suite.write(&old), suite.write(&Value::new([2], vec![0i64, 9])));
    let [bad, no, yes, same, taken, lost, word] = [0; 7].map(|_| suite.fresh());
    let run = |op: Op, ins: &[Id], out: Id| Item::Run(Node::new(op, ins, &[out]));
    let guard = || Op::Guard { finite: true };
    suite.submit(vec![
        run(Op::Gather { kind: GatherKind::Take, axis: 0 }, &[kept, index], bad),
        run(guard(), &[kept, bad, kept], no),
        run(guard(), &[kept], yes),
        run(Op::Commit, &[no, bad, kept], same),
        run(Op::Commit, &[yes, same, kept], taken),
        run(Op::Commit, &[yes, bad, kept], lost),
    ]);
    // A word that has failed is no consent.
    suite.submit(vec![run(Op::Cast(DType::Bool), &[bad], word)]);
    let unsaid = suite.fresh();
    let single = Op::Reduce { kind: ReduceKind::Any, axes: AxisSet::one(0), keep: false };
    let failed = suite.fresh();
    suite.submit(vec![run(single, &[word], failed), run(Op::Commit, &[failed, bad, kept], unsaid)]);
    for (id, want) in [(no, false), (yes, true)] {
        suite.compare(&|| "a step".into(), "its guard", &guard(), id, &Value::new([], vec![want]));
    }
    for id in [same, taken, unsaid] {
        suite.compare(&|| "a step".into(), "what it keeps", &Op::Commit, id, &old);
    }
    poisoned(suite, "a step", "take", lost, &Error::Index { op: "take".into(), index: 9, length: 2 });
    suite.free([kept, index, bad, no, yes, same, taken, lost, word, failed, unsaid]);
    suite.settles("a step", start);
}

/// Names that never were, and names that are no more.
fn absent(suite: &mut Suite<'_>) {
    suite.totals.cases += 1;
    let start = settled(&*suite.device);
    let never = suite.fresh();
    let x = suite.write(&Value::new([2], vec![1f32, 2.0]));
    let outs = [suite.fresh(), suite.fresh(), suite.fresh()];
    let neg = |from: Id, to: Id| Item::Run(Node::new(Op::Unary(Unary::Neg), &[from], &[to]));
    let unread = suite.read(never).map(|v| v.meta());
    if unread != Err(Error::UnknownValue(never)) {
        suite.found(
            "a name that never was",
            Problem::Failure { of: "reading it".into(), want: Error::UnknownValue(never), got: unread },
        );
    }
    suite.submit(vec![
        Item::Free(never),
        neg(never, outs[0]),
        neg(x, outs[1]),
        Item::Free(x),
        neg(x, outs[2]),
    ]);
    poisoned(suite, "a name that never was", "neg", outs[0], &Error::UnknownValue(never));
    poisoned(suite, "a use after free", "neg", outs[2], &Error::UnknownValue(x));
    let want = Value::new([2], vec![-1f32, -2.0]);
    suite.compare(&|| "a use before free".into(), "its result", &Op::Unary(Unary::Neg), outs[1], &want);
    let unread = suite.read(x).map(|v| v.meta());
    if unread != Err(Error::UnknownValue(x)) {
        suite.found(
            "a freed value",
            Problem::Failure { of: "reading it".into(), want: Error::UnknownValue(x), got: unread },
        );
    }
    suite.free(outs);
    suite.settles("absent names", start);
}

fn poisoned(suite: &mut Suite<'_>, case: &str, op: &str, id: Id, cause: &Error) {
    let got = suite.read(id).map(|v| v.meta());
    let right = matches!(&got, Err(Error::Failed { op: name, .. }) if name == op)
        && got.as_ref().is_err_and(|e| e.root() == cause);
    if !right {
        suite.found(case, Problem::Failure { of: id.to_string(), want: cause.clone(), got });
    }
}
