//! Each check finds what it is there for.

use super::*;

fn tree(files: &[(&str, &str)]) -> Tree {
    Tree(files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect())
}

fn has(faults: &[String], text: &str) -> bool {
    faults.iter().any(|fault| fault.contains(text))
}

#[test]
fn comments_and_test_modules_are_no_code() {
    let text = "//! Instant\nuse a; // Instant\n#[cfg(test)]\nmod helper;\nfn f() {}\n\n#[cfg(test)]\nmod tests {\n    fn g() {\n    }\n}\nfn h() {}\n";
    let lines: Vec<&str> =
        code(text).into_iter().map(|(_, line)| line).filter(|line| !line.is_empty()).collect();
    assert_eq!(lines, ["use a;", "fn f() {}", "fn h() {}"]);
}

#[test]
fn arrows_are_those_of_the_table() {
    let table = "| crate | holds | depends on |\n|---|---|---|\n| `ir` | x `y` | nothing |\n| `cpu` | x | `ir`, `host` |\n";
    let manifest = "[dependencies]\nkiln-ir.workspace = true\nkiln-fuse = { workspace = true }\nlibm = \"1\"\n[dev-dependencies]\nkiln-nn.workspace = true\n";
    let faults = arrows(&tree(&[
        ("ARCHITECTURE.md", table),
        ("crates/ir/Cargo.toml", "[dependencies]\n"),
        ("crates/cpu/Cargo.toml", manifest),
        ("checks/new/Cargo.toml", ""),
    ]));
    assert!(has(&faults, "`cpu` depends on `fuse` too") && has(&faults, "`cpu` does not depend on `host`"));
    assert!(has(&faults, "no row for `checks/new`"));
    assert_eq!(faults.len(), 3);
}

#[test]
fn a_clock_in_the_protocol_is_found() {
    let faults = absences(&tree(&[
        ("crates/remote/src/protocol/link.rs", "use std::time::{Duration, Instant};\n"),
        ("crates/ir/src/expr.rs", "m!(value: |$x| 1);"),
    ]));
    assert!(has(&faults, "protocol/link.rs:1 names `Instant`"));
    assert!(has(&faults, "crates/ir/src/expr.rs:1 takes the tables' value column"));
    assert!(has(&faults, "crates/grad/src is not there"));
}

#[test]
fn an_operation_in_a_decorator_is_found() {
    let faults = operations(&tree(&[
        (
            "crates/device/src/record.rs",
            "match op { Op::Cast(_) => 1, kiln_ir::Op::Sort { .. } => Op::names() }",
        ),
        ("crates/fuse/src/window.rs", "fn f() {}"),
    ]));
    assert!(has(&faults, "record.rs:1 names `Op::Cast`"));
    assert!(has(&faults, "window.rs no longer names `Op::Custom`"));
    assert!(has(&faults, "crates/fuse/src/moved.rs is not there"));
}

#[test]
fn an_operation_that_nobody_records_is_found() {
    let list = "    \"cumsum\" [Op::Scan { kind: ScanKind::Sum, axis }] (axis: axis) 1..=1 => 1;\n    \"sort\" [Op::Sort { axis }] () 1..=1 => 2;\n";
    let method = "scan(ScanKind::Sum, x); sort(Op::Sorted, x)";
    let faults =
        uses(&tree(&[("crates/ir/src/op/list.rs", list), ("crates/tensor/src/methods/a.rs", method)]));
    assert_eq!(faults, ["no method and no rule of derivatives records `sort` (Op::Sort)"]);
}

#[test]
fn a_variable_beside_the_list_is_found() {
    let faults = variables(&tree(&[
        ("README.md", "| variable | effect |\n|---|---|\n| `KILN_FUSE=0` | x |\n| `KILN_TEST_LOST` | x |\n"),
        ("crates/a/src/lib.rs", "let x = std::env::var(\"KILN_FUSE\"); // KILN_TEST_TYPO\n"),
        ("crates/a/tests/a.rs", "KILN_TEST_ROLE"),
        ("crates/a/src/b.rs", "KILN_TEST_ROLE"),
    ]));
    assert!(
        has(&faults, "README.md lists KILN_TEST_LOST") && has(&faults, "does not say what KILN_PLAN does")
    );
    assert!(has(&faults, "lib.rs:1 reads a variable") && has(&faults, "lib.rs:1 names KILN_TEST_TYPO"));
    assert!(has(&faults, "src/b.rs:1 names KILN_TEST_ROLE") && !has(&faults, "tests/a.rs"));
    assert!(!has(&faults, "say what KILN_FUSE does"));
}

#[test]
fn unsafe_is_where_it_is_said() {
    let faults = unsafety(&tree(&[
        ("ARCHITECTURE.md", "- `unsafe` lies in `cpu`, `host`: why.\n"),
        ("crates/cpu/Cargo.toml", ""),
        ("crates/cpu/src/lib.rs", "unsafe fn f() {}"),
        ("crates/host/Cargo.toml", ""),
        ("crates/host/src/lib.rs", "// unsafe\n#![deny(unsafe_code)]"),
        ("crates/nn/Cargo.toml", ""),
        ("crates/nn/src/lib.rs", "fn f() {}"),
    ]));
    assert_eq!(
        faults,
        ["ARCHITECTURE.md: there is no `unsafe` in `host`", "crates/nn/src/lib.rs does not forbid `unsafe`"]
    );
}
