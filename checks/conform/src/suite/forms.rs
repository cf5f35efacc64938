//! Text and wire forms of every node that is run: what is written reads back as it was.

use super::cases::Case;
use super::{Problem, Suite};
use kiln_ir::wire::{Reader, Table, Writer};
use kiln_ir::{Id, Item, Node, Program, text};

pub fn check(suite: &mut Suite<'_>, case: &Case) {
    let ins: Vec<Id> = (0..case.ins.len() as u64).map(Id).collect();
    let outs: Vec<Id> = (0..case.op.outputs() as u64).map(|i| Id(ins.len() as u64 + i)).collect();
    let inputs = ins.iter().copied().zip(case.ins.iter().map(|x| x.meta())).collect();
    let items = vec![Item::Run(Node::new(case.op.clone(), &ins, &outs)), Item::Free(outs[0])];
    let program = Program { inputs, items };
    let printed = program.to_string();
    if text::parse(&printed).as_ref() != Ok(&program) {
        suite.found(&case.op.to_string(), Problem::Form { form: "text", text: printed.clone() });
    }
    let table = Table::local();
    let mut w = Writer::default();
    table.items(&program.items, &mut w);
    let mut r = Reader::new(&w.bytes);
    if table.read_items(&mut r).as_ref() != Ok(&program.items) || !r.is_empty() {
        suite.found(&case.op.to_string(), Problem::Form { form: "wire", text: printed });
    }
}
