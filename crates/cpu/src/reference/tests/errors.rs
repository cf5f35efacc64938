//! What is refused, and custom operations.

use super::*;
use kiln_ir::custom::{self, CustomOp};
use kiln_ir::{CustomCall, GatherKind, V};
use std::sync::Arc;

#[track_caller]
fn fails(text: &str, inputs: &[&[f64]], want: EvalError) {
    assert_eq!(results(text, inputs).unwrap_err(), want, "{text}");
}

#[test]
fn indices_out_of_range() {
    let index = |op: &str, index, length| EvalError::Index { op: op.into(), index, length };
    let gather = "x = input f32[3]\ni = input i32[2]\ny = gather x i axis=0";
    fails(gather, &[&[0.; 3], &[2., 3.]], index("gather", 3, 3));
    fails(gather, &[&[0.; 3], &[-1., 3.]], index("gather", -1, 3));
    fails("x = input f32[3,0]\ni = input u8[1]\ny = take x i axis=0", &[&[], &[5.]], index("take", 5, 3));
    fails("x = input f32[0]\ni = input u8[1]\ny = take x i axis=0", &[&[], &[0.]], index("take", 0, 0));
    let scatter = "x = input i8[2]\ni = input i64[1]\ns = input i8[1]\ny = scatter x i s axis=0";
    fails(scatter, &[&[0.; 2], &[2.], &[0.]], index("scatter", 2, 2));
    let add = "x = input i8[2,2]\ni = input i64[1]\ns = input i8[2,1]\ny = take_add x i s axis=1";
    fails(add, &[&[0.; 4], &[-9.], &[0.; 2]], index("take_add", -9, 2));
    let (x, i) = (Value::new([2], vec![1f32, 2.0]), Value::new([1], vec![u64::MAX]));
    let got = eval(&Op::Gather { kind: GatherKind::Take, axis: 0 }, &[&x, &i]);
    assert_eq!(got, Err(index("take", i64::MAX, 2)));
    let none = Value::new([0], Vec::<u64>::new());
    let got =
        eval(&Op::Gather { kind: GatherKind::Take, axis: 0 }, &[&Value::new([0], Vec::<f32>::new()), &none]);
    assert_eq!(got.unwrap()[0].meta(), Meta::new(DType::F32, [0]));
}

#[test]
fn integer_division() {
    let text = |dtype: &str, op: &str| format!("a = input {dtype}[2]\nb = input {dtype}[]\nc = {op} a b");
    for op in ["floor_divide", "remainder", "fmod"] {
        for dtype in ["i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"] {
            let zero = EvalError::Divide { op: op.into(), error: DivideError::ByZero };
            fails(&text(dtype, op), &[&[1., 2.], &[0.]], zero);
        }
    }
    let overflow = EvalError::Divide { op: "floor_divide".into(), error: DivideError::Overflow };
    fails(&text("i8", "floor_divide"), &[&[1., -128.], &[-1.]], overflow);
    check(&text("i8", "remainder"), &[&[1., -128.], &[-1.]], &[("i8[2]", &[0., 0.])]);
    check(&text("i8", "fmod"), &[&[1., -128.], &[-1.]], &[("i8[2]", &[0., 0.])]);
    check(&text("i8", "floor_divide"), &[&[-7., 7.], &[2.]], &[("i8[2]", &[-4., 3.])]);
    check(
        &text("f32", "floor_divide"),
        &[&[-7., 7.], &[0.]],
        &[("f32[2]", &[f64::NEG_INFINITY, f64::INFINITY])],
    );
}

#[test]
fn operands_and_inputs_that_do_not_fit() {
    let (a, b) = (Value::new([2], vec![1f32; 2]), Value::new([3], vec![1f32; 3]));
    let got = eval(&Op::Binary(kiln_ir::Binary::Add), &[&a, &b]);
    assert!(matches!(got, Err(EvalError::Op(OpError::ShapeMismatch { .. }))));
    assert!(matches!(
        eval_lowered(&Op::Unary(kiln_ir::Unary::Exp), &[&a]),
        Err(EvalError::NotLowerable { .. })
    ));
    let program = verify(kiln_ir::text::parse("x = input f32[2]\ny = exp x").unwrap()).unwrap();
    let want = Meta::new(DType::F32, [2]);
    assert_eq!(run(&program, &HashMap::new()), Err(EvalError::Input { id: Id(0), want, got: None }));
    let got = run(&program, &HashMap::from([(Id(0), b.clone())]));
    assert_eq!(got, Err(EvalError::Input { id: Id(0), want, got: Some(b.meta()) }));
}

#[test]
fn freed_values_are_gone() {
    let program =
        verify(kiln_ir::text::parse("x = input f32[1]\ny = neg x\nfree x\nz = neg y").unwrap()).unwrap();
    let alive = run(&program, &HashMap::from([(Id(0), Value::new([1], vec![2f32]))])).unwrap();
    assert_eq!(alive.len(), 2);
    assert_eq!(alive[&Id(2)].slice::<f32>(), Some(&[2f32][..]));
}

/// Doubles bytes; it has no lowering where the attribute is 3. Its lowering reads beyond its operand where the attribute is 1, and gives another shape where it is 2.
struct Twice;

impl CustomOp for Twice {
    fn name(&self) -> &str {
        "test.twice"
    }
    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(ins.iter().copied().collect())
    }
    fn eval(&self, _: &[u8], ins: &[(Meta, &[u8])], outs: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        for (to, &from) in outs[0].1.iter_mut().zip(ins[0].1) {
            *to = from.checked_mul(2).ok_or_else(|| format!("{from} is too large"))?;
        }
        Ok(())
    }
    fn lower<'a>(&self, attrs: &[u8], ins: &[V<'a>]) -> Option<SmallVec<[V<'a>; 2]>> {
        let x = ins[0];
        Some(SmallVec::from_iter([match attrs {
            [1] => {
                let beyond = x.full([1], kiln_ir::Scalar::from_i64(DType::I64, 99));
                V::emit(Op::Gather { kind: GatherKind::Take, axis: 0 }, &[x, beyond])[0] + x
            }
            [2] => x.reshape([3, 1]),
            [3] => return None,
            _ => x + x,
        }]))
    }
}

#[test]
fn custom_operations_run_on_bytes_and_through_their_lowering() {
    custom::register(Twice).unwrap();
    let call =
        |attrs: &[u8]| Op::Custom(Arc::new(CustomCall { name: "test.twice".into(), attrs: attrs.to_vec() }));
    let x = Value::new([3], vec![1u8, 2, 3]);
    let twice = Value::new([3], vec![2u8, 4, 6]);
    assert_eq!(eval(&call(&[]), &[&x]).unwrap()[0], twice);
    assert_eq!(eval_lowered(&call(&[]), &[&x]).unwrap()[0], twice);
    // Its lowering is what it means, and wraps; without one its own code runs, which does not.
    let large = Value::new([1], vec![200u8]);
    assert_eq!(eval(&call(&[]), &[&large]).unwrap()[0], Value::new([1], vec![144u8]));
    let large = eval(&call(&[3]), &[&large]);
    assert_eq!(large, Err(EvalError::Custom { op: "test.twice".into(), message: "200 is too large".into() }));
    let beyond = eval_lowered(&call(&[1]), &[&x]);
    assert_eq!(beyond, Err(EvalError::Index { op: "take".into(), index: 99, length: 3 }));
    assert!(matches!(eval_lowered(&call(&[2]), &[&x]), Err(EvalError::Custom { .. })));
    let unknown = Op::Custom(Arc::new(CustomCall { name: "test.unknown".into(), attrs: vec![] }));
    assert!(matches!(eval(&unknown, &[]), Err(EvalError::Op(OpError::UnknownCustom { .. }))));
}
