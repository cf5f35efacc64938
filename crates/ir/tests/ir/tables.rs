//! The lists of operations are whole.

use kiln_ir::*;

/// Gives each field its default.
struct Defaults;

impl FieldSource for Defaults {
    fn get(&mut self, _: &'static str, like: Field) -> Result<Field, FormError> {
        Ok(like)
    }
}

struct Kinds(String);

impl FieldSink for Kinds {
    fn put(&mut self, key: &'static str, field: Field) {
        self.0 += &format!("{}{key}:{}", if self.0.is_empty() { "" } else { " " }, field.kind());
    }
}

#[test]
fn every_name_has_a_signature_and_builds() {
    let names = Op::names();
    for (i, name) in names.iter().enumerate() {
        assert!(!names[..i].contains(name), "{name} is listed twice");
        let signature = Op::signature(name).unwrap_or_else(|| panic!("{name} has no signature"));
        let op = Op::build(name, &mut Defaults).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(op.form_name(), *name);
        if !matches!(op, Op::Custom(_)) {
            assert_eq!(op.name(), *name);
        }
        let mut kinds = Kinds(String::new());
        op.fields(&mut kinds);
        assert_eq!(kinds.0, signature, "{name} is written with other fields than it is read with");
    }
    assert_eq!(Op::build("no_such", &mut Defaults), Err(FormError::UnknownOp { name: "no_such".into() }));
    assert_eq!(Op::signature("no_such"), None);
}

#[test]
fn every_row_is_complete() {
    for op in Unary::ALL {
        let name = op.name();
        assert_eq!(Unary::from_name(name), Some(*op));
        assert!(op.doc().ends_with('.') && op.doc().len() > 3, "{name}");
        match op.grad() {
            Grad1::Is(_) | Grad1::Zero => {
                assert!(matches!(op.domain(), Domain::Float | Domain::Num), "{name}")
            }
            Grad1::No(reason) => assert!(!reason.is_empty(), "{name}"),
        }
    }
    for op in Binary::ALL {
        let name = op.name();
        assert_eq!(Binary::from_name(name), Some(*op));
        assert!(op.doc().ends_with('.') && op.doc().len() > 3, "{name}");
        match op.grad() {
            Grad2::Is(..) | Grad2::Zero => {
                assert!(matches!(op.domain(), Domain::Float | Domain::Num), "{name}")
            }
            Grad2::No(reason) => assert!(!reason.is_empty(), "{name}"),
        }
    }
}

#[test]
fn places_in_the_tables_are_the_variants_numbers() {
    assert!(Unary::ALL.iter().enumerate().all(|(i, op)| *op as usize == i));
    assert!(Binary::ALL.iter().enumerate().all(|(i, op)| *op as usize == i));
}

#[test]
fn built_in_names_cannot_be_registered() {
    struct Thief;
    impl custom::CustomOp for Thief {
        fn name(&self) -> &str {
            "exp"
        }
        fn infer(&self, _: &[u8], _: &[Meta]) -> Result<smallvec::SmallVec<[Meta; 2]>, OpError> {
            Ok(smallvec::SmallVec::new())
        }
        fn eval(&self, _: &[u8], _: &[(Meta, &[u8])], _: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
            Ok(())
        }
    }
    assert_eq!(custom::register(Thief), Err(custom::NameTaken { name: "exp".into() }));
}
