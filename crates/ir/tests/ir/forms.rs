//! What is written reads back.

use crate::any::{meta, op, program};
use kiln_ir::relative::Relative;
use kiln_ir::text::{parse, parse_meta, parse_op};
use kiln_ir::wire::{Reader, Table, VERSION, WireError, Writer};
use kiln_ir::*;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn operations_as_text_and_json(op in op()) {
        let text = op.to_string();
        prop_assert_eq!(&parse_op(&text).unwrap(), &op, "{}", text);
        let json = serde_json::to_string(&op).unwrap();
        prop_assert_eq!(serde_json::from_str::<Op>(&json).unwrap(), op, "{}", json);
    }

    #[test]
    fn metas(meta in meta()) {
        prop_assert_eq!(parse_meta(&meta.to_string()), Some(meta));
        let mut w = Writer::default();
        w.meta(&meta);
        let mut r = Reader::new(&w.bytes);
        prop_assert_eq!(r.meta().unwrap(), meta);
        prop_assert!(r.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn streams_as_text(program in program()) {
        let text = program.to_string();
        prop_assert_eq!(parse(&text).unwrap(), program, "{}", text);
    }

    #[test]
    fn streams_as_bytes(program in program()) {
        let table = Table::local();
        let mut w = Writer::default();
        table.encode(&mut w);
        table.items(&program.items, &mut w);
        let mut r = Reader::new(&w.bytes);
        let read = Table::decode(&mut r).unwrap();
        prop_assert_eq!(&read, &table);
        prop_assert_eq!(read.read_items(&mut r).unwrap(), program.items);
        prop_assert!(r.is_empty());
    }

    #[test]
    fn relative_form_forgets_names(program in program()) {
        let relative = |id: fn(Id) -> Id| {
            let mut relative = Relative::new();
            for item in &program.items {
                let item = match item {
                    Item::Free(x) => Item::Free(id(*x)),
                    Item::Run(node) => Item::Run(Node {
                        op: node.op.clone(),
                        ins: node.ins.iter().map(|&x| id(x)).collect(),
                        outs: node.outs.iter().map(|&x| id(x)).collect(),
                    }),
                };
                relative.push(&item, |_| Meta::new(DType::F32, [2, 3]));
            }
            relative
        };
        let (a, b) = (relative(|id| id), relative(|id| Id(!id.0)));
        prop_assert_eq!(a.structure(), b.structure());
        prop_assert_eq!(a.bindings(), b.bindings());
        prop_assert_eq!(a.hash(), b.hash());
    }
}

#[test]
fn free_names_do_not_collide_with_printed_ones() {
    let program = parse("x = input f32[2]\nv0 = exp x\nv1 = neg v0").unwrap();
    assert_eq!(program.to_string(), "v0 = input f32[2]\nv1 = exp v0\nv2 = neg v1\n");
    assert!(verify(program).is_ok());
}

/// A table as another build might have written it.
fn table(entries: &[(&str, &str)]) -> Table {
    let mut w = Writer::default();
    w.int(VERSION);
    w.int(entries.len() as u64);
    for (name, signature) in entries {
        w.text(name);
        w.text(signature);
    }
    Table::decode(&mut Reader::new(&w.bytes)).unwrap()
}

fn local(name: &'static str) -> (&'static str, String) {
    (name, Op::signature(name).unwrap())
}

/// This build's entries for the operations of [`STREAM`].
pub fn small_table() -> Table {
    let entries = ["full", "mul", "slice", "sort", "sum", "layer_norm", "conv", "custom"].map(local);
    table(&entries.each_ref().map(|(n, s)| (*n, s.as_str())))
}

pub const STREAM: &str = "
v0 = full shape=[2,300] value=f32:1.5
v1 = mul v0 v0
v2 = slice v1 axis=1 start=1 end=257 step=2
free v0
v3, v4 = sort v2 axis=1 descending=true take=5
v5 = sum v3 axes=[0,1] keep=true
v6 = layer_norm v2 axes=1 eps=1e-5
v7 = conv v2 v2 stride=[2,1,1] low=[1,0,0] high=[1,0,0] dilation=[1,1,1] extent=[0,0,0] groups=2
v8 = custom v2 name=x612e62 attrs=x00ff
";

/// A change of these bytes breaks every stored file and every peer: it must be deliberate, with a new [`VERSION`].
#[test]
fn bytes_are_pinned() {
    let hex = |write: &dyn Fn(&mut Writer)| {
        let mut w = Writer::default();
        write(&mut w);
        w.bytes.iter().map(|b| format!("{b:02x}")).collect::<String>()
    };
    let table = table(&[("mul", ""), ("sum", "axes:axes keep:flag")]);
    assert_eq!(hex(&|w| table.encode(w)), "0102036d756c000373756d13617865733a61786573206b6565703a666c6167");
    let items = parse(STREAM).unwrap().items;
    let table = small_table();
    assert_eq!(hex(&|w| table.items(&items, w)), format!("09{}", PINNED.concat()));
    for (item, want) in items.iter().zip(PINNED) {
        assert_eq!(hex(&|w| table.item(item, w)), want, "{item}");
    }
}

/// The lines of [`STREAM`].
const PINNED: [&str; 9] = [
    "010202ac0203663332808080fe03000100",
    "020200000101",
    "03010181020201010102",
    "0000",
    "040101050102020304",
    "05030101030105",
    "0601f168e388b5f8e43e01020106",
    "07020101010000010000010101000000020202020107",
    "0803612e620200ff01020108",
];

#[test]
fn tables_of_other_builds_are_read_by_name() {
    // Another build has two operations in the middle that are unknown here, its own order, and another `sort`.
    let (exp, add, sort) = (local("exp"), local("add"), local("sort"));
    let foreign = table(&[
        (add.0, &add.1),
        ("warp", "axis:axis"),
        (sort.0, "axis:axis take:bound"),
        ("weft", ""),
        (exp.0, &exp.1),
    ]);
    let read = |place: u64, fields: &[u8]| {
        let mut w = Writer::default();
        w.int(place + 1);
        w.bytes.extend_from_slice(fields);
        w.ids(&[Id(1)]);
        w.ids(&[Id(2)]);
        foreign.read_item(&mut Reader::new(&w.bytes))
    };
    let node = |op| Ok(Item::Run(Node::new(op, &[Id(1)], &[Id(2)])));
    let unknown = |name: &str| Err(WireError::UnknownOp { name: name.into() });
    assert_eq!(read(0, &[]), node(Op::Binary(Binary::Add)));
    assert_eq!(read(1, &[0]), unknown("warp"));
    assert_eq!(read(2, &[0, 3]), unknown("sort"));
    assert_eq!(read(3, &[]), unknown("weft"));
    assert_eq!(read(4, &[]), node(Op::Unary(Unary::Exp)));
    assert_eq!(read(5, &[]), Err(WireError::Malformed { what: "operation" }));
}

#[test]
fn inserting_a_line_changes_nothing_for_known_operations() {
    let mut entries: Vec<(&str, String)> = Op::names().into_iter().map(local).collect();
    entries.insert(entries.len() / 2, ("later_invention", "axis:axis keep:flag".into()));
    let newer = table(&entries.iter().map(|(n, s)| (*n, s.as_str())).collect::<Vec<_>>());
    let items = parse(STREAM).unwrap().items;
    let mut w = Writer::default();
    newer.items(&items, &mut w);
    assert_eq!(newer.read_items(&mut Reader::new(&w.bytes)), Ok(items));
}

#[test]
fn other_versions_are_refused() {
    let mut w = Writer::default();
    w.int(VERSION + 1);
    assert_eq!(Table::decode(&mut Reader::new(&w.bytes)), Err(WireError::Version { got: VERSION + 1 }));
}
