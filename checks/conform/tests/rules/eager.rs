//! A builder that computes at once, in f64 and by definition: what the rules are checked against.

use kiln_ir::math::value;
use kiln_ir::*;
use smallvec::SmallVec;
use std::cell::RefCell;

/// Values and the nodes that gave them, in order. Integers and bools are f64 too.
#[derive(Default)]
pub struct Eager {
    values: RefCell<Vec<(Meta, Vec<f64>)>>,
    nodes: RefCell<Vec<Node>>,
}

impl Eager {
    pub fn leaf(&self, meta: Meta, data: Vec<f64>) -> V<'_> {
        assert_eq!(meta.shape.numel(), data.len());
        let mut values = self.values.borrow_mut();
        values.push((meta, data));
        V::new(self, values.len() as u32 - 1)
    }

    pub fn data(&self, v: V<'_>) -> Vec<f64> {
        self.values.borrow()[v.key() as usize].1.clone()
    }

    pub fn nodes(&self) -> Vec<Node> {
        self.nodes.borrow().clone()
    }
}

impl Build for Eager {
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]> {
        let operands: Vec<(Meta, Vec<f64>)> =
            ins.iter().map(|&k| self.values.borrow()[k as usize].clone()).collect();
        let metas: Vec<Meta> = operands.iter().map(|(meta, _)| *meta).collect();
        let outs = infer(&op, &metas).unwrap_or_else(|e| panic!("{e}"));
        let data = evaluate(&op, &operands, &outs);
        let mut values = self.values.borrow_mut();
        let keys: SmallVec<[u32; 2]> = (values.len() as u32..).take(outs.len()).collect();
        values.extend(outs.into_iter().zip(data));
        let id = |keys: &[u32]| keys.iter().map(|&k| Id(k as u64)).collect::<Vec<_>>();
        self.nodes.borrow_mut().push(Node::new(op, &id(ins), &id(&keys)));
        keys
    }

    fn meta(&self, value: u32) -> Meta {
        self.values.borrow()[value as usize].0
    }
}

type Place = Vec<usize>;

fn places(shape: &[usize]) -> impl Iterator<Item = Place> + '_ {
    (0..shape.iter().product()).map(move |mut n: usize| {
        let mut place = vec![0; shape.len()];
        for (p, d) in place.iter_mut().zip(shape).rev() {
            (*p, n) = (n % d, n / d);
        }
        place
    })
}

/// Where `place` of a larger shape lies in `shape`, which broadcasts to it.
fn offset(shape: &[usize], place: &[usize]) -> usize {
    let lead = place.len() - shape.len();
    shape.iter().zip(&place[lead..]).fold(0, |at, (&d, &p)| at * d + if d == 1 { 0 } else { p })
}

fn evaluate(op: &Op, ins: &[(Meta, Vec<f64>)], outs: &[Meta]) -> Vec<Vec<f64>> {
    let out = outs[0].shape;
    let get = |i: usize, place: &[usize]| ins[i].1[offset(&ins[i].0.shape, place)];
    let map = |f: &dyn Fn(&Place) -> f64| vec![places(&out).map(|p| f(&p)).collect::<Vec<f64>>()];
    let write = |start: Vec<f64>, from: usize, to: &dyn Fn(&Place) -> Place, add: bool| {
        let mut data = start;
        for p in places(&ins[from].0.shape) {
            let slot = &mut data[offset(&out, &to(&p))];
            *slot = if add { *slot + get(from, &p) } else { get(from, &p) };
        }
        vec![data]
    };
    match op {
        Op::Full { value, .. } => map(&|_| value.to_f64()),
        Op::Iota { axis, .. } => map(&|p| p[*axis as usize] as f64),
        Op::Random { .. } | Op::Custom(_) | Op::Guard { .. } | Op::Commit => {
            unreachable!("no rule is made of them")
        }
        Op::Unary(op) => map(&|p| unary(*op, get(0, p))),
        Op::Binary(op) => map(&|p| binary(*op, get(0, p), get(1, p))),
        Op::Select => map(&|p| if get(0, p) != 0.0 { get(1, p) } else { get(2, p) }),
        Op::Cast(_) => map(&|p| get(0, p)),
        Op::Move(op) => match *op {
            Move::Reshape(_) => vec![ins[0].1.clone()],
            Move::Permute(order) => map(&|p| {
                let mut q = p.clone();
                order.iter().enumerate().for_each(|(i, &o)| q[o as usize] = p[i]);
                get(0, &q)
            }),
            Move::Expand(_) => map(&|p| get(0, p)),
            Move::Slice { axis, start, step, .. } => {
                map(&|p| get(0, &at(p, axis, start + p[axis as usize] * step)))
            }
            Move::Assign { axis, start, step, .. } => {
                write(ins[0].1.clone(), 1, &|p| at(p, axis, start + p[axis as usize] * step), false)
            }
            Move::Flip(axes) => map(&|p| {
                get(
                    0,
                    &(0..p.len())
                        .map(|i| if axes.has(i) { out[i] - 1 - p[i] } else { p[i] })
                        .collect::<Place>(),
                )
            }),
            Move::Cat { axis } => map(&|p| {
                let mut k = p[axis as usize];
                let mut i = 0;
                while k >= ins[i].0.shape[axis as usize] {
                    k -= ins[i].0.shape[axis as usize];
                    i += 1;
                }
                get(i, &at(p, axis, k))
            }),
        },
        Op::Reduce { kind, axes, .. } => {
            let shape = ins[0].0.shape;
            let kept = shape.reduced(*axes, true);
            let mut lists = vec![Vec::new(); kept.numel()];
            places(&shape).for_each(|p| lists[offset(&kept, &p)].push(get(0, &p)));
            vec![lists.iter().map(|list| reduce(*kind, list)).collect()]
        }
        Op::Scan { kind, axis, reverse } => {
            let mut data = vec![0.0; out.numel()];
            let n = out[*axis as usize];
            for p in places(&out.reduced(AxisSet::one(*axis as usize), true)) {
                let mut state = if *kind == ScanKind::Prod { 1.0 } else { 0.0 };
                for k in 0..n {
                    let q = at(&p, *axis, if *reverse { n - 1 - k } else { k });
                    state = match kind {
                        ScanKind::Sum => state + get(0, &q),
                        ScanKind::Prod => state * get(0, &q),
                        ScanKind::Linear => state * get(0, &q) + get(1, &q),
                    };
                    data[offset(&out, &q)] = state;
                }
            }
            vec![data]
        }
        Op::Dot { transpose } => {
            let depth = *ins[0].0.shape.last().unwrap();
            let rank = out.len();
            map(&|p| {
                let (m, n) = (p[rank - 2], p[rank - 1]);
                let with = |i: usize, r: usize, c: usize| {
                    let shape = &ins[i].0.shape;
                    let batch = &shape[..shape.len() - 2];
                    let [rows, cols] = [shape[shape.len() - 2], shape[shape.len() - 1]];
                    let b = offset(batch, &p[..rank - 2]);
                    ins[i].1[(b * rows + r) * cols + c]
                };
                (0..depth)
                    .map(|k| with(0, m, k) * if *transpose { with(1, n, k) } else { with(1, k, n) })
                    .sum()
            })
        }
        Op::Conv { kind, conv } => {
            let (x, w, y) = match kind {
                ConvKind::Forward => (ins[0].0, ins[1].0, outs[0]),
                ConvKind::Input => (outs[0], ins[1].0, ins[0].0),
                ConvKind::Weight => (ins[0].0, outs[0], ins[1].0),
            };
            let mut data = vec![0.0; out.numel()];
            let per = w.shape[0] / conv.groups as usize;
            for py in places(&y.shape) {
                for pw in places(&w.shape).filter(|pw| pw[0] == py[1]) {
                    let mut px = vec![py[0], py[1] / per * w.shape[1] + pw[1]];
                    px.extend((0..py.len() - 2).map(|i| {
                        (py[i + 2] * conv.stride[i] as usize + pw[i + 2] * conv.dilation[i] as usize)
                            .wrapping_sub(conv.low[i] as usize)
                    }));
                    if (2..px.len()).any(|i| px[i] >= x.shape[i]) {
                        continue;
                    }
                    let (to, value) = match kind {
                        ConvKind::Forward => (&py, get(0, &px) * get(1, &pw)),
                        ConvKind::Input => (&px, get(0, &py) * get(1, &pw)),
                        ConvKind::Weight => (&pw, get(0, &px) * get(1, &py)),
                    };
                    data[offset(&out, to)] += value;
                }
            }
            vec![data]
        }
        Op::Pool { kind, pool } => {
            let (x, y) =
                if *kind == PoolKind::SumInput { (out, ins[0].0.shape) } else { (ins[0].0.shape, out) };
            let mut data = vec![if *kind == PoolKind::Max { f64::NEG_INFINITY } else { 0.0 }; out.numel()];
            let mut index = data.clone();
            let kernel: Vec<usize> = pool.kernel[..x.len() - 2].iter().map(|&k| k as usize).collect();
            for py in places(&y) {
                for pk in places(&kernel) {
                    let mut px = py[..2].to_vec();
                    px.extend((0..pk.len()).map(|i| {
                        (py[i + 2] * pool.stride[i] as usize + pk[i] * pool.dilation[i] as usize)
                            .wrapping_sub(pool.low[i] as usize)
                    }));
                    if (2..px.len()).any(|i| px[i] >= x[i]) {
                        continue;
                    }
                    match kind {
                        PoolKind::SumInput => data[offset(&x, &px)] += get(0, &py),
                        PoolKind::Sum => data[offset(&y, &py)] += get(0, &px),
                        PoolKind::Max if get(0, &px) > data[offset(&y, &py)] => {
                            data[offset(&y, &py)] = get(0, &px);
                            index[offset(&y, &py)] = offset(&x[2..], &px[2..]) as f64;
                        }
                        PoolKind::Max => {}
                    }
                }
            }
            vec![data, index]
        }
        Op::Gather { kind: GatherKind::Each, axis } => map(&|p| get(0, &at(p, *axis, get(1, p) as usize))),
        Op::Gather { kind: GatherKind::Take, axis } => map(&|p| get(0, &taken(p, *axis, &ins[1]))),
        Op::Scatter { kind: ScatterKind::TakeAdd, axis } => {
            write(ins[0].1.clone(), 2, &|p| taken(p, *axis, &ins[1]), true)
        }
        Op::Scatter { kind, axis } => {
            let add = *kind == ScatterKind::EachAdd;
            write(ins[0].1.clone(), 2, &|p| at(p, *axis, get(1, p) as usize), add)
        }
        Op::Sort { axis, descending, take } => {
            let n = ins[0].0.shape[*axis as usize];
            let (mut data, mut index) = (vec![0.0; out.numel()], vec![0.0; out.numel()]);
            for p in places(&ins[0].0.shape.reduced(AxisSet::one(*axis as usize), true)) {
                let value = |k: usize| get(0, &at(&p, *axis, k));
                let mut order: Vec<usize> = (0..n).collect();
                order.sort_by(|&a, &b| value(a).total_cmp(&value(b)));
                if *descending {
                    order.reverse();
                }
                for (k, &from) in order[..*take].iter().enumerate() {
                    data[offset(&out, &at(&p, *axis, k))] = value(from);
                    index[offset(&out, &at(&p, *axis, k))] = from as f64;
                }
            }
            vec![data, index]
        }
        Op::Named(_) => {
            let inner = Eager::default();
            let operands: Vec<V<'_>> =
                ins.iter().map(|(meta, data)| inner.leaf(*meta, data.clone())).collect();
            lower(op, &operands).unwrap().into_iter().map(|v| inner.data(v)).collect()
        }
    }
}

fn at(place: &[usize], axis: u8, index: usize) -> Place {
    let mut place = place.to_vec();
    place[axis as usize] = index;
    place
}

fn taken(place: &[usize], axis: u8, (meta, data): &(Meta, Vec<f64>)) -> Place {
    let (axis, rank) = (axis as usize, meta.shape.len());
    let index = data[offset(&meta.shape, &place[axis..axis + rank])] as usize;
    [&place[..axis], &[index], &place[axis + rank..]].concat()
}

fn reduce(kind: ReduceKind, list: &[f64]) -> f64 {
    let largest = list.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let smallest = list.iter().copied().fold(f64::INFINITY, f64::min);
    match kind {
        ReduceKind::Sum => list.iter().sum(),
        ReduceKind::Mean => list.iter().sum::<f64>() / list.len() as f64,
        ReduceKind::Prod => list.iter().product(),
        ReduceKind::Max | ReduceKind::Any => largest,
        ReduceKind::Min | ReduceKind::All => smallest,
        ReduceKind::ArgMax => list.iter().position(|&x| x == largest).unwrap() as f64,
        ReduceKind::ArgMin => list.iter().position(|&x| x == smallest).unwrap() as f64,
    }
}

/// The value of an operation, bools as 0 and 1.
fn unary(op: Unary, x: f64) -> f64 {
    let number = value::unary_float(op, x).or_else(|| value::unary_num(op, x));
    let truth = || value::unary_test(op, x).or_else(|| value::unary_bits(op, x != 0.0));
    number.or_else(|| truth().map(f64::from)).expect("every operation is of one domain")
}

/// As [`unary`], of two operands.
fn binary(op: Binary, a: f64, b: f64) -> f64 {
    let number = value::binary_float(op, a, b).or_else(|| value::binary_num(op, a, b));
    let truth = || value::binary_compare(op, a, b).or_else(|| value::binary_bits(op, a != 0.0, b != 0.0));
    number.or_else(|| truth().map(f64::from)).expect("every operation is of one domain")
}
