//! Every elementwise operation on every dtype that it takes, over odd shapes.

use super::*;
use kiln_ir::{Binary, Shape, Unary, broadcast};

fn small(meta: Meta, from: usize) -> Value {
    let x: Vec<f64> = (0..meta.shape.numel()).map(|i| ((i + from) % 3) as f64 + 1.0).collect();
    value(meta, &x)
}

/// The elements one by one, each as a value of rank 0.
fn elements(v: &Value) -> Vec<Value> {
    let meta = Meta { dtype: v.meta().dtype, shape: Shape::default() };
    v.to_bytes().chunks(meta.bytes()).map(|bytes| Value::from_bytes(meta, bytes)).collect()
}

#[test]
fn unary_operations() {
    let mut walked = 0;
    for &op in Unary::ALL {
        for dtype in DType::ALL {
            for shape in [&[][..], &[0], &[3], &[2, 1, 2], &[1; 8]] {
                let meta = Meta::new(dtype, shape);
                if infer(&Op::Unary(op), &[meta]).is_err() {
                    continue;
                }
                let x = small(meta, 0);
                let y = eval(&Op::Unary(op), &[&x]).unwrap().remove(0);
                let each: Vec<u8> = elements(&x)
                    .iter()
                    .flat_map(|x| eval(&Op::Unary(op), &[x]).unwrap()[0].to_bytes())
                    .collect();
                assert_eq!(y.to_bytes(), each, "{op:?} {meta}");
                walked += 1;
            }
        }
    }
    assert!(walked > 1000);
}

#[test]
fn binary_operations() {
    let pairs: [(&[usize], &[usize]); 8] = [
        (&[], &[]),
        (&[0], &[0]),
        (&[3], &[3]),
        (&[2, 1], &[1, 3]),
        (&[3], &[]),
        (&[1], &[0]),
        (&[2, 3], &[3]),
        (&[1, 2, 1], &[2, 1, 3]),
    ];
    let mut walked = 0;
    for &op in Binary::ALL {
        for dtype in DType::ALL {
            for (a, b) in pairs {
                let (a, b) = (Meta::new(dtype, a), Meta::new(dtype, b));
                if infer(&Op::Binary(op), &[a, b]).is_err() {
                    continue;
                }
                let (x, y) = (small(a, 0), small(b, 1));
                let z = eval(&Op::Binary(op), &[&x, &y]).unwrap().remove(0);
                let shape = broadcast(&a.shape, &b.shape).unwrap();
                assert_eq!(z.shape, shape);
                let spread =
                    |v: &Value| elements(&eval(&Op::Move(kiln_ir::Move::Expand(shape)), &[v]).unwrap()[0]);
                let each: Vec<u8> = spread(&x)
                    .iter()
                    .zip(&spread(&y))
                    .flat_map(|(x, y)| eval(&Op::Binary(op), &[x, y]).unwrap()[0].to_bytes())
                    .collect();
                assert_eq!(z.to_bytes(), each, "{op:?} {a} {b}");
                walked += 1;
            }
        }
    }
    assert!(walked > 1500);
}

#[test]
fn conversions_between_all_plain_dtypes() {
    let plain = || DType::ALL.into_iter().filter(|d| !d.is_quantised());
    for from in plain() {
        for to in plain() {
            for shape in [&[][..], &[0], &[3]] {
                let x = small(Meta::new(from, shape), 0);
                let y = eval(&Op::Cast(to), &[&x]).unwrap().remove(0);
                let back = eval(&Op::Cast(from), &[&y]).unwrap().remove(0);
                if to != DType::Bool {
                    assert_eq!(back, x, "{from} {to}");
                }
            }
        }
    }
}
