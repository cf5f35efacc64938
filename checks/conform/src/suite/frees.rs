//! What ends and what must not: a freed value is gone, and whatever a device reuses its memory for, nothing else
//! changes. Scenarios are short programs; `keep` lists what must still be right at the end.

use super::{Problem, Suite, settled};
use kiln_cpu::reference::{self, Value};
use kiln_device::{Bytes, Data, Error, Place};
use kiln_ir::text::parse;
use kiln_ir::*;
use std::collections::HashMap;

/// Programs whose inputs are row-major; `|` ends a batch. What is not freed must be right at the end.
#[rustfmt::skip]
const PROGRAMS: &[(&str, &str)] = &[
    ("an alias is freed while its base lives", "x = input f32[6]\nr = reshape x shape=[2,3]\ny = neg r\nfree r"),
    ("a base is freed while its view lives", "x = input f32[6]\ns = slice x axis=0 start=1 end=6 step=2\nfree x\n|\ny = neg s"),
    ("a view of a freed base is overwritten by nobody", "x = input f32[6]\ns = flip x axes=[0]\nfree x\ny = neg s\nz = exp s\nfree s"),
    ("two views, one ends", "x = input f32[2,3]\na = permute x order=[1,0]\nb = reshape x shape=[6]\nfree x\ny = neg b\nfree b\nz = neg a"),
    ("an operand twice", "x = input f32[6]\ny = mul x x"),
    ("an operand twice, then freed", "x = input f32[6]\ny = mul x x\nfree x"),
    ("an operand and its alias", "x = input f32[6]\na = reshape x shape=[6]\ny = sub x a\nfree a\nz = sub x y\nfree y"),
    ("both operands end", "x = input f32[6]\nw = input f32[6]\ny = sub x w\nfree x\nfree w"),
    ("the broadcast operand ends", "x = input f32[1]\nw = input f32[6]\ny = sub w x\nfree x"),
    ("the larger operand ends", "x = input f32[2,1]\nw = input f32[2,3]\ny = sub x w\nfree w"),
    ("an expanded operand ends", "x = input f32[1,3]\ne = expand x shape=[4,3]\ny = neg e\nfree e\nz = add x y"),
    ("free right after use, then used memory", "x = input f32[600]\ny = exp x\nfree x\nz = neg y\nw = add y z\nfree z"),
    ("free in a later batch", "x = input f32[6]\ny = exp x\n|\nfree x\n|\nz = neg y"),
    ("free in the next batch before other work", "x = input f32[6]\ny = exp x\n|\nfree x\nz = exp y\nfree y"),
    ("a cast to the same dtype", "x = input f32[6]\nc = cast x dtype=f32\ny = neg x\nfree x\nz = exp c"),
    ("a cast of the same size", "x = input i32[6]\ny = cast x dtype=f32\nfree x\nz = cast y dtype=i32"),
    ("a test of another size", "x = input f32[6]\ny = isnan x\nfree x"),
    ("a comparison in place of bytes", "x = input u8[6]\nw = input u8[6]\ny = lt x w\nfree x"),
    ("assign to a value that ends", "x = input f32[6]\nv = input f32[2]\ny = assign x v axis=0 start=0 end=6 step=3\nfree x"),
    ("assign to a value with a view", "x = input f32[6]\nr = slice x axis=0 start=0 end=4 step=1\nv = input f32[2]\ny = assign x v axis=0 start=0 end=6 step=3\nfree x"),
    ("assign a part of itself", "x = input f32[6]\nv = slice x axis=0 start=4 end=6 step=1\ny = assign x v axis=0 start=0 end=2 step=1\nfree x"),
    ("assign a flipped self", "x = input f32[6]\nv = flip x axes=[0]\ny = assign x v axis=0 start=0 end=6 step=1\nfree x\nfree v"),
    ("select over each operand", "c = input bool[6]\nx = input f32[6]\nw = input f32[6]\ny = select c x w\nfree x\nz = select c y w\nfree w\nfree c"),
    ("a constant is expanded", "k = full shape=[6] value=f32:2.0\nx = input f32[6]\ny = mul k x\nz = add k y\nfree k"),
    ("one of two results ends", "x = input f32[6]\na, b = sort x axis=0 descending=false take=6\nfree a\nfree x"),
    ("a sum ends beside its operand", "x = input f32[6]\ns = sum x axes=[0] keep=true\ny = sub x s\nfree s\nfree x"),
    ("a chain in place", "x = input f32[1025]\na = neg x\nfree x\nb = exp a\nfree a\nc = sqrt b\nfree b\nd = mul c c\nfree c"),
    ("cat of one thing twice", "x = input f32[6]\ny = cat x x axis=0\nfree x"),
    ("scatter into a value that ends", "x = input f32[6]\ni = iota shape=[3] dtype=i64 axis=0\nv = input f32[3]\ny = scatter_add x i v axis=0\nfree x"),
    ("a product and its operands end", "x = input f32[3,3]\ny = dot x x transpose=true\nfree x\nz = dot y y transpose=false\nfree y"),
    ("a softmax of a value that ends", "x = input f32[2,3]\ny = softmax x axis=1\nfree x\nz = layer_norm y axes=1 eps=1e-5\nfree y"),
    ("a zero-size value", "x = input f32[0,3]\ny = neg x\nfree x\nz = sum y axes=[0] keep=false\nfree y"),
];

pub fn check(suite: &mut Suite<'_>) {
    for (name, text) in PROGRAMS {
        program(suite, name, text);
    }
    held_reads(suite);
    staged(suite);
    ended_reads(suite);
}

fn program(suite: &mut Suite<'_>, name: &str, text: &str) {
    suite.totals.cases += 1;
    let start = settled(&*suite.device);
    let whole = parse(&text.replace('|', "")).unwrap_or_else(|e| panic!("{name}: {e}"));
    let verified = verify(whole.clone()).unwrap_or_else(|e| panic!("{name}: {e}"));
    let inputs: HashMap<Id, Value> = (whole.inputs.iter().zip(31..))
        .map(|(&(id, meta), seed)| (id, super::values::value(meta, super::values::Fill::Tame, seed)))
        .collect();
    let wants = reference::run(&verified, &inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
    let names: HashMap<Id, Id> = verified.metas.keys().map(|&id| (id, suite.fresh())).collect();
    for (id, x) in &inputs {
        suite.device.write(names[id], Data::new(x.meta(), Bytes::new(x.to_bytes())), Place::Reuse);
    }
    let renamed = |item: &Item| match item {
        Item::Free(id) => Item::Free(names[id]),
        Item::Run(node) => {
            let all = |ids: &[Id]| ids.iter().map(|id| names[id]).collect::<Vec<_>>();
            Item::Run(Node::new(node.op.clone(), &all(&node.ins), &all(&node.outs)))
        }
    };
    // Inputs may stand anywhere in the text, so a batch ends after as many items as its lines have.
    let mut items = whole.items.iter().map(renamed);
    for batch in text.split('|') {
        let count = batch.lines().filter(|l| !l.trim().is_empty() && !l.contains("= input ")).count();
        suite.submit(items.by_ref().take(count).collect());
    }
    let wants: HashMap<Id, Value> = wants.into_iter().map(|(id, x)| (names[&id], x)).collect();
    suite.compare_all(name, &wants);
    for id in verified.metas.keys().map(|id| names[id]).filter(|id| !wants.contains_key(id)) {
        gone(suite, name, id);
    }
    suite.free(wants.into_keys());
    suite.settles(name, start);
}

fn gone(suite: &mut Suite<'_>, name: &str, id: Id) {
    let got = suite.read(id).map(|v| v.meta());
    if got != Err(Error::UnknownValue(id)) {
        suite.found(
            name,
            Problem::Failure { of: format!("reading the freed {id}"), want: Error::UnknownValue(id), got },
        );
    }
}

fn neg(from: Id, to: Id) -> Item {
    Item::Run(Node::new(Op::Unary(Unary::Neg), &[from], &[to]))
}

/// What was read stays as it was, whatever becomes of the value.
fn held_reads(suite: &mut Suite<'_>) {
    suite.totals.cases += 1;
    let name = "a read is held while its value's memory is reused";
    let start = settled(&*suite.device);
    let x = Value::new([6], vec![1f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let (id, out, last) = (suite.write(&x), suite.fresh(), suite.fresh());
    match suite.device.read(id).wait() {
        Err(error) => suite.found(name, Problem::Failed { of: "the read".into(), error }),
        Ok(data) => {
            suite.submit(vec![neg(id, out), Item::Free(id), neg(out, last), Item::Free(out)]);
            suite.compare_all(name, &HashMap::from([(last, x.clone())]));
            let held = Value::from_bytes(data.meta, &data.bytes);
            if held != x {
                suite.found(
                    name,
                    Problem::Value {
                        of: "the read".into(),
                        element: 0,
                        want: format!("{x:?}"),
                        got: format!("{held:?}"),
                    },
                );
            }
        }
    }
    suite.free([last]);
    suite.settles(name, start);
}

/// Staged data can be written more than once, and writing over a value made of it leaves it alone.
fn staged(suite: &mut Suite<'_>) {
    suite.totals.cases += 1;
    let name = "staged data is written twice";
    let start = settled(&*suite.device);
    let x = Value::new([6], vec![1i32, 2, 3, 4, 5, 6]);
    let negative = Value::new([6], vec![-1i32, -2, -3, -4, -5, -6]);
    let staged = suite.device.stage(vec![Data::new(x.meta(), Bytes::new(x.to_bytes()))]);
    let Some(data) = staged.into_iter().next() else {
        return suite.found(name, Problem::Failed { of: "staging".into(), error: Error::Stopped });
    };
    let [a, b, c, d] = [suite.fresh(), suite.fresh(), suite.fresh(), suite.fresh()];
    suite.device.write(a, data.clone(), Place::Reuse);
    suite.submit(vec![neg(a, b), Item::Free(a)]);
    suite.compare_all(name, &HashMap::from([(b, negative.clone())]));
    suite.device.write(c, data, Place::Reuse);
    suite.submit(vec![neg(c, d), Item::Free(c)]);
    suite.compare_all(name, &HashMap::from([(d, negative)]));
    suite.free([b, d]);
    suite.settles(name, start);
}

/// A read takes its place when it is called: a free that follows does not end it.
fn ended_reads(suite: &mut Suite<'_>) {
    suite.totals.cases += 1;
    let name = "a value is freed between the call of a read and its answer";
    let start = settled(&*suite.device);
    let x = Value::new([3], vec![1f32, -2.0, 3.0]);
    let id = suite.write(&x);
    let read = suite.device.read(id);
    drop(suite.device.read(id));
    suite.free([id]);
    match read.wait() {
        Ok(data) if Value::from_bytes(data.meta, &data.bytes) == x => {}
        Ok(data) => {
            suite.found(name, Problem::Meta { of: "the read".into(), want: x.meta(), got: data.meta })
        }
        Err(error) => suite.found(name, Problem::Failed { of: "the read".into(), error }),
    }
    gone(suite, name, id);
    suite.settles(name, start);
}
